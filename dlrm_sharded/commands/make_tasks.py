"""Write a set of seeded tasks as task_000.json, task_001.json, ...: `dlrm-make-tasks`.

    dlrm-make-tasks paper out=tasks num=100 seed=0

`dlrm-plan` plans each of them. tasks.json names the set and the kind of each task. Without `num`,
all tasks of the set are written, and without `out`, to the folder tasks.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.words import read_words
from dlrm_sharded.datasets.task_sets import TASK_SETS
from dlrm_sharded.files.errors import ConfigError, check_count
from dlrm_sharded.files.json_files import folder_to_write, write_json

KEYS = {"out": (str, "tasks"), "num": (int, None), "seed": (int, 0)}


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
    arguments = {} if asked.num is None else {"num": asked.num}
    tasks = TASK_SETS[task_set](asked.seed, **arguments)
    kinds = {}
    for number, benchmark_task in enumerate(tasks):
        name = f"task_{number:03d}.json"
        write_json(out / name, benchmark_task.task.to_json())
        kinds[name] = benchmark_task.kind
    write_json(out / "tasks.json", {"set": task_set, "seed": asked.seed, "kinds": kinds})
    return len(tasks)


if __name__ == "__main__":
    sys.exit(main())
