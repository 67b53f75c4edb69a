from collections.abc import Iterator

import pytest

from tests.launch.conftest import application as application
from tests.slurm.cluster import Cluster, slurm_cluster, why_not


@pytest.fixture(scope="session")
def needs_slurm() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def slurm(needs_slurm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
