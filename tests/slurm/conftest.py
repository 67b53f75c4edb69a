from collections.abc import Iterator

import pytest

from tests.launch.conftest import application as application
from tests.slurm.cluster import Cluster, slurm_cluster, why_not


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), kill_wait_s=10) as cluster:
        yield cluster
