from collections.abc import Iterator

import pytest

from dlrm_sharded.ranks.distributed import Rank, process_group


@pytest.fixture(scope="module")
def rank() -> Iterator[Rank]:
    with pytest.MonkeyPatch.context() as patch:
        for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            patch.delenv(key, raising=False)
        with process_group() as me:
            yield me
