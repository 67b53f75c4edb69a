"""Write a set of seeded tasks as task_000.json, task_001.json, ...: `dlrm-make-tasks`.

    dlrm-make-tasks paper --out tasks --num 100 --seed 0

`dlrm-plan` plans each of them. tasks.json names the set and the kind of each task.
"""

from __future__ import annotations

import argparse
import sys

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.datasets.task_sets import TASK_SETS
from dlrm_sharded.files.errors import ConfigError, check_count
from dlrm_sharded.files.json_files import folder_to_write, write_json


def main() -> int:
    with exit_codes():
        options = _options()
        num_tasks = make_tasks(options)
        print(f"{options.out}: {num_tasks} tasks")
    return 0


def make_tasks(options: argparse.Namespace) -> int:
    """Write the folder and return the number of tasks.

    Raises:
        ConfigError: an option cannot be used, or the folder has tasks already.
    """
    check_count("--seed", options.seed, least=0)
    if options.num is not None:
        check_count("--num", options.num, least=1)
    out = folder_to_write("--out", options.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make --out={out}: {error.strerror}") from error
    if any(out.glob("task*.json")):
        raise ConfigError(f"{out} has tasks already; name another folder with --out")
    arguments = {} if options.num is None else {"num": options.num}
    tasks = TASK_SETS[options.set](options.seed, **arguments)
    kinds = {}
    for number, benchmark_task in enumerate(tasks):
        name = f"task_{number:03d}.json"
        write_json(out / name, benchmark_task.task.to_json())
        kinds[name] = benchmark_task.kind
    write_json(out / "tasks.json", {"set": options.set, "seed": options.seed, "kinds": kinds})
    return len(tasks)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("set", choices=TASK_SETS)
    parser.add_argument("--out", default="tasks", help="folder to write [%(default)s]")
    parser.add_argument("--num", type=int, help="number of tasks; by default all of the set")
    parser.add_argument("--seed", type=int, default=0, help="seed of the tasks [%(default)s]")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
