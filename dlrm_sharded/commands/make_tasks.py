"""Write a set of seeded tasks as task_000.json, task_001.json, ...: `dlrm-make-tasks`.

    dlrm-make-tasks paper out=tasks num=100 seed=0
    dlrm-make-tasks paper hardware=h100_sxm max_dim=64

`dlrm-compare` gives all of them to several sharders, and `dlrm-plan` plans one. tasks.json names
the set and the kind of each task. Without `num`, all tasks of the set are written, and without
`out`, to the folder tasks. With `hardware`, the ranks are GPUs of this kind, with its links and
70 % of its memory for tables, or `memory_gib`. With `max_dim`, no table is wider.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from types import SimpleNamespace

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.words import read_words
from dlrm_sharded.datasets.benchmark_task import BenchmarkTask, with_max_dim
from dlrm_sharded.datasets.presets import PAPER_DIMS
from dlrm_sharded.datasets.task_sets import TASK_SETS
from dlrm_sharded.files.errors import ConfigError, check_count, check_number
from dlrm_sharded.files.json_files import folder_to_write, write_json
from dlrm_sharded.hardware.gpus.gpu_specs import GpuSpec, named_gpu_spec
from dlrm_sharded.plans.task import GIB

KEYS = {
    **{"out": (str, "tasks"), "num": (int, None), "seed": (int, 0)},
    **{"hardware": (str, None), "memory_gib": (float, None), "max_dim": (int, None)},
}
MEMORY_FRACTION = 0.7
"""Share of a GPU's memory for tables, as conf/topology has it."""


def main() -> int:
    with exit_codes():
        asked = read_words(
            __doc__, KEYS, names=f"one of {', '.join(TASK_SETS)}", choices=tuple(TASK_SETS)
        )
        print(f"{asked.out}: {make_tasks(asked)} tasks")
    return 0


def make_tasks(asked: SimpleNamespace) -> int:
    """Write the folder and return the number of tasks.

    Raises:
        ConfigError: a value cannot be used, or the folder has tasks already.
    """
    check_count("seed", asked.seed, least=0)
    if asked.num is not None:
        check_count("num", asked.num, least=1)
    if len(asked.names) > 1:
        raise ConfigError(f"name one set of tasks, not {' and '.join(asked.names)}")
    out = folder_to_write("out", asked.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make out={out}: {error.strerror}") from error
    if any(out.glob("task*.json")):
        raise ConfigError(f"{out} has tasks already; name another folder with out=")
    [task_set] = asked.names
    tasks = drawn_tasks(task_set, asked)
    kinds = {}
    for number, benchmark_task in enumerate(tasks):
        name = f"task_{number:03d}.json"
        write_json(out / name, benchmark_task.task.to_json())
        kinds[name] = benchmark_task.kind
    made_from = {key: getattr(asked, key) for key in KEYS if key != "out"}
    write_json(out / "tasks.json", {"set": task_set, **made_from, "kinds": kinds})
    return len(tasks)


def drawn_tasks(task_set: str, asked: SimpleNamespace) -> list[BenchmarkTask]:
    """Return the tasks of a set, on GPUs and with narrow tables if that is asked for."""
    arguments = {} if asked.num is None else {"num": asked.num}
    tasks = TASK_SETS[task_set](asked.seed, **arguments)
    if asked.max_dim is not None:
        check_count("max_dim", asked.max_dim, least=PAPER_DIMS[0])
        tasks = [with_max_dim(task, asked.max_dim, seed=i) for i, task in enumerate(tasks)]
    if asked.hardware is None:
        if asked.memory_gib is not None:
            raise ConfigError("memory_gib is that of a GPU; name one: hardware=h100_sxm")
        return tasks
    spec = named_gpu_spec(asked.hardware, key="hardware")
    memory_gib = asked.memory_gib
    if memory_gib is None:
        assert spec.memory_gib is not None, "all GPUs with a name have one"
        memory_gib = MEMORY_FRACTION * spec.memory_gib
    check_number("memory_gib", memory_gib, above=True)
    spec.check_memory(memory_gib)
    return [_on_gpus(task, spec, int(memory_gib * GIB)) for task in tasks]


def _on_gpus(found: BenchmarkTask, spec: GpuSpec, memory_bytes: int) -> BenchmarkTask:
    topology = found.task.topology
    per_host, domain = topology.ranks_per_host, spec.gpus_of_domain
    gpus = dataclasses.replace(
        topology,
        memory_bytes=memory_bytes,
        memory_bytes_by_rank=None,
        local_world_size=per_host if per_host <= domain else math.gcd(per_host, domain),
        compute_device="cuda",
        intra_host_bytes_per_s=1e9 * spec.link_gb_per_s,
        inter_host_bytes_per_s=1e9 * spec.adapter_gb_per_s,
    )
    return BenchmarkTask(found.kind, dataclasses.replace(found.task, topology=gpus))


if __name__ == "__main__":
    sys.exit(main())
