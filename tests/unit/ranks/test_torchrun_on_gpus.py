"""What our launcher chooses for ranks on GPUs: torch's allocator, and the cores near each GPU."""

import os

import pytest
from torch.distributed import run

from dlrm_sharded.ranks import torchrun

ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
VARIABLES = (
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_GRAPH_REGISTER"),
    *("DLRM_SHARDED_NUMA_BINDING", "OMP_NUM_THREADS"),
)


class Launcher:
    """Prepares ranks on a host of some GPUs, as `dlrm-torchrun` does before it starts them."""

    num_gpus = 4
    cores = 2
    has_option = True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        environment = {key: os.environ[key] for key in os.environ if key not in VARIABLES}
        monkeypatch.setattr(torchrun.os, "environ", environment)
        gpus = [str(number) for number in range(self.num_gpus)]
        monkeypatch.setattr(torchrun, "visible_gpus", lambda: gpus[: self.num_gpus])
        monkeypatch.setattr(torchrun.torch.cuda, "is_available", lambda: self.num_gpus > 0)
        monkeypatch.setattr(torchrun, "threads_of_a_rank", lambda num: 8)
        monkeypatch.setattr(torchrun, "cores_near_gpus", lambda found: self.cores)
        self.said: list[str] = []
        monkeypatch.setattr(torchrun, "say", self.said.append)

    def prepare(self, *options: str, **environment: str) -> tuple[str | None, dict[str, str]]:
        """Return the binding, and the environment of the ranks as far as it is chosen here."""
        for key in VARIABLES:
            torchrun.os.environ.pop(key, None)
        torchrun.os.environ.update(environment)
        self.said.clear()
        args = run.parse_args([*options, "program.py"])
        if not self.has_option:
            del args.numa_binding
        torchrun._prepare_environment(args, 1)
        found = {key: value for key in VARIABLES if (value := torchrun.os.environ.get(key))}
        return getattr(args, "numa_binding", None), found


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    return Launcher(monkeypatch)


def test_ranks_on_gpus(launcher):
    chosen = {**ALLOCATOR, "NCCL_GRAPH_REGISTER": "0", "OMP_NUM_THREADS": "2"}
    assert launcher.prepare() == ("node", chosen)
    [line] = launcher.said
    assert "expandable_segments:True (PYTORCH_ALLOC_CONF overrides it)" in line
    assert "DLRM_SHARDED_NUMA_BINDING=none" in line
    launcher.cores = 16
    assert launcher.prepare()[1]["OMP_NUM_THREADS"] == "8", "as many as without a binding"


def test_ranks_on_a_cpu(launcher):
    launcher.num_gpus = 0
    assert launcher.prepare() == (None, {"OMP_NUM_THREADS": "8"})
    assert launcher.said == []


@pytest.mark.parametrize("key", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["", "max_split_size_mb:128"])
def test_an_allocator_of_the_user(key, value, launcher):
    binding, chosen = launcher.prepare(**{key: value})
    assert {name: chosen.get(name, "") for name in ALLOCATOR | {key: ""}} == {
        **dict.fromkeys(ALLOCATOR, ""),
        key: value,
    }
    assert binding == "node"
    assert chosen["NCCL_GRAPH_REGISTER"] == "0", "theirs may have segments that grow too"
    assert "torch allocates" not in launcher.said[0]


def test_bindings_that_are_not_chosen(launcher):
    assert launcher.prepare("--numa-binding=socket")[0] == "socket"
    assert launcher.prepare(DLRM_SHARDED_NUMA_BINDING="none")[0] is None
    assert (
        launcher.prepare("--numa-binding=socket", DLRM_SHARDED_NUMA_BINDING="none")[0] == "socket"
    )
    launcher.cores = 0
    binding, chosen = launcher.prepare()
    assert (binding, chosen["OMP_NUM_THREADS"]) == (None, "8")
    launcher.cores, launcher.has_option = 2, False
    assert launcher.prepare()[0] is None, "torch before 2.9"
    assert [line.count("node") for line in launcher.said] == [0]
    user = {**ALLOCATOR, "DLRM_SHARDED_NUMA_BINDING": "none"}
    launcher.prepare(**user)
    assert launcher.said == []


def test_what_a_user_sets_for_nccl_and_threads_stays(launcher):
    user = {"NCCL_GRAPH_REGISTER": "1", "OMP_NUM_THREADS": "5"}
    assert launcher.prepare(**user)[1] == {**ALLOCATOR, **user}


def test_torch_gets_the_binding(launcher):
    """Torch's own configuration of the job, which its agent reads."""
    args = run.parse_args(["--nproc-per-node", "2", "program.py"])
    torchrun._prepare_environment(args, 1)
    config, _, _ = run.config_from_args(args)
    assert config.numa_options.affinity_mode.value == "node"
