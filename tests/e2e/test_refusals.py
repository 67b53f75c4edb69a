"""Commands refuse what they cannot do with one message and exit code 2, and write nothing."""

import importlib
from pathlib import Path

import pytest

from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.testing import small_tasks
from tests.unit.conftest import RunCommand
from tests.unit.conftest import run_command as run_command

pytestmark = pytest.mark.slow

DATA = (
    *("data=synthetic", "data.max_rows=1000", "batch_size=64", "topology.world_size=2"),
    *("topology.memory_gib=1", "topology.compute_device=cpu"),
)
TASKS = ("tasks=tasks", "sharders=[dim]")
POLICY = ("policy=autoshard", "costs=predicted", "tasks.tables=[task.json]")
ON_GPUS = (*TASKS, "topologies=h100_80gb")
TOO_LARGE = "need 258,880,048 B (0.24 GiB), all 2 ranks together have 20,000,000"
STANDARD_OUTPUT = "out is '-', standard output"
REFUSED: dict[str, tuple[tuple[tuple[str, ...], str], ...]] = {
    "compare": (
        (("sharders=[dim]", "tasks=none"), "tasks is 'none', where there is no task"),
        (("sharders=[dim]", "tasks=bad/*.json"), "bad/task_0.json"),
        (("sharders=[dim]",), "give either tasks=, a folder or a pattern"),
        ((*TASKS, "task_set=paper"), "and not both"),
        (("sharders=[dim]", "task_set=papers"), "task_set is 'papers'; known: paper"),
        ((*TASKS, "num=3"), "num=3 has no effect"),
        (("tasks=tasks", "sharders=[dim,dim]"), "names 'dim' twice"),
        ((*TASKS, "reference=size"), "reference is 'size'; known: dim"),
        ((*TASKS, "format=xlsx"), "format is 'xlsx'; known: csv, parquet"),
        ((*TASKS, "cost_model=none"), "cost_model is none"),
        ((*TASKS, "hardware=h100"), "the task is for CPUs"),
        (
            ("sharders=[dim]", "task_set=dreamshard_table_1", "num=1", "measured=true"),
            "leave measured out",
        ),
        ((*TASKS, "ranks=[8]"), "ranks=[8] has no effect: topologies="),
        ((*TASKS, "topologies=[detect]"), "topology detect names no hardware"),
        ((*ON_GPUS, "hardware=h100"), "topologies name their GPUs"),
        ((*ON_GPUS, "ranks=12"), "topology.ranks_per_host is 8; it must divide"),
        (
            (*ON_GPUS, "ranks=5"),
            "batch_size of task_0 is 192; it is global and must be a multiple of the 5 ranks",
        ),
        ((*TASKS, "limit_s=0"), "limit_s is 0"),
        ((*TASKS, "rounds=9"), "rounds=9 has no effect: measured=true"),
        ((*TASKS, "out=-"), STANDARD_OUTPUT),
    ),
    "plan": (
        (("task=task.json", "sharder.seeed=1"), "seeed"),
        (("task=none.json",), "cannot read the task file none.json"),
        ((), "either task=task.json or data="),
        (("task=task.json", "data=rm1"), "and not both"),
        (("task=huge.json",), TOO_LARGE),
        (("task=task.json", "sharder._target_=my.own.Sharder"), "my.own.Sharder"),
        (("task=task.json", "cost_model=none", "explain=true"), "cost_model=learned"),
        ((*DATA, "out=task.json"), "would both be written to 'task.json'; set task_out"),
        ((*DATA, "task_out=x/y.json"), "task_out is 'x/y.json', but there is no folder"),
    ),
    "calibrate": ((("out=-",), STANDARD_OUTPUT),),
    "export": (((".", "out=-"), STANDARD_OUTPUT),),
    "train_policy": (
        (("out=-",), STANDARD_OUTPUT),
        ((*POLICY, "policy.reward=x"), "policy.reward is 'x'; known: cost, balance"),
        ((*POLICY, "costs=guessed"), "costs is 'guessed'; known: measured, predicted"),
        ((*POLICY, "tasks.full=[0.9]"), "tasks.full is [0.9]; it must be two rising shares"),
        ((*POLICY, "tasks.tables=[mine]"), "a kind in tasks.tables is 'mine'; known: papers, var"),
        ((*POLICY, "tasks.tables=[]"), "tasks.tables is []; it must be a list that is not empty"),
        (
            (*POLICY, "tasks.batch_sizes=[0]"),
            "a size in tasks.batch_sizes is 0; it must be an integer >= 1",
        ),
    ),
}
CASES = [(name, *case) for name, cases in REFUSED.items() for case in cases]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with tasks good and bad."""
    monkeypatch.chdir(tmp_path)
    tasks = small_tasks()
    for name in ("task.json", "tasks/task_0.json"):
        Path(name).parent.mkdir(exist_ok=True)
        write_json(name, tasks["w3-mixed"].to_json())
    write_json("huge.json", tasks["w2-huge_table"].to_json())
    Path("bad").mkdir()
    Path("bad/task_0.json").write_text('{"tables": [}')
    return tmp_path


@pytest.mark.parametrize(
    ("command", "words", "message"),
    CASES,
    ids=[f"{name}-{' '.join(words)}" for name, words, _ in CASES],
)
def test_refuses(
    command: str, words: tuple[str, ...], message: str, folder: Path, run_command: RunCommand
) -> None:
    before = {path: path.lstat().st_ino for path in folder.rglob("*")}
    main = importlib.import_module(f"dlrm_sharded.commands.{command}").main
    done = run_command(main, *words)
    assert done.returncode == 2, done.stderr
    [error] = (line for line in done.stderr.splitlines() if "error: " in line)
    assert message in error
    assert "Traceback" not in done.stderr
    assert {path: path.lstat().st_ino for path in folder.rglob("*")} == before
