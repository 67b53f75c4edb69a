"""Our launcher chooses torch's allocator and the cores near each GPU for ranks on GPUs."""

from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import run

from dlrm_sharded.ranks import torchrun

ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
CHOSEN = {**ALLOCATOR, "NCCL_GRAPH_REGISTER": "0", "OMP_NUM_THREADS": "2"}
UNBOUND = CHOSEN | {"OMP_NUM_THREADS": "8"}
NO_BINDING = {"DLRM_SHARDED_NUMA_BINDING": "none"}
Prepare = Callable[..., tuple[str | None, dict[str, str], list[str]]]


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """Prepare ranks that have 8 cores each, of which some are near their GPU."""

    def prepared(*options: str, num_gpus: int = 4, cores: int = 2, **environment: str) -> Any:
        said: list[str] = []
        monkeypatch.setattr(torchrun.os, "environ", environment)
        monkeypatch.setattr(torchrun, "visible_gpus", lambda: ["0"] * num_gpus)
        monkeypatch.setattr(torchrun.torch.cuda, "is_available", lambda: num_gpus > 0)
        monkeypatch.setattr(torchrun, "threads_of_a_rank", lambda num: 8)
        monkeypatch.setattr(torchrun, "cores_near_gpus", lambda found: cores)
        monkeypatch.setattr(torchrun, "say", said.append)
        args = run.parse_args([*options, "program.py"])
        torchrun._prepare_environment(args, 1)
        keys = {*CHOSEN, *NO_BINDING, "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys()
        return run.config_from_args(args)[0].numa_options, {k: environment[k] for k in keys}, said

    return prepared


@pytest.mark.parametrize(
    ("words", "machine", "environment", "mode", "chosen"),
    [
        ([], {}, {}, "node", CHOSEN),
        ([], {"cores": 16}, {}, "node", UNBOUND),
        ([], {"cores": 0}, {}, None, UNBOUND),
        ([], {"num_gpus": 0}, {}, None, {"OMP_NUM_THREADS": "8"}),
        ([], {}, NO_BINDING, None, UNBOUND | NO_BINDING),
        (["--numa-binding=socket"], {}, NO_BINDING, "socket", UNBOUND | NO_BINDING),
        ([], {}, {"OMP_NUM_THREADS": "5"}, "node", CHOSEN | {"OMP_NUM_THREADS": "5"}),
        ([], {}, {"NCCL_GRAPH_REGISTER": "1"}, "node", CHOSEN | {"NCCL_GRAPH_REGISTER": "1"}),
    ],
)
def test_what_is_chosen(words, machine, environment, mode, chosen, prepare):
    found, variables, said = prepare(*words, **machine, **environment)
    assert (found and found.affinity_mode.value) == mode
    assert variables == chosen
    assert len(said) == bool(machine.get("num_gpus", 4)), "one line, of what is chosen"
    assert ("NUMA node (DLRM_SHARDED_NUMA_BINDING=none" in "".join(said)) == (mode == "node")
    assert ("expandable_segments:True (PYTORCH_ALLOC_CONF" in "".join(said)) == bool(said)


@pytest.mark.parametrize("key", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["", "max_split_size_mb:128"])
def test_an_allocator_of_the_user_stays(key, value, prepare):
    _, variables, said = prepare(**{key: value}, **NO_BINDING)
    assert {name: text for name, text in variables.items() if "ALLOC" in name} == {key: value}
    assert variables["NCCL_GRAPH_REGISTER"] == "0", "its segments may grow too"
    assert said == []
