"""dlrm-advise: a table and a choice, or one message and an exit code."""

import csv
import functools
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dlrm_sharded.commands.yamls import CONF_DIR
from dlrm_sharded.hardware.gpus.gpu_specs import gpu_names
from dlrm_sharded.plans.plan import read_plan
from dlrm_sharded.plans.task import GIB, read_task
from dlrm_sharded.plans.validation import validate
from dlrm_sharded.simulation.machines import CPU_NAMES
from dlrm_sharded.step.parts import PARTS
from tests.e2e.runs import script

TASK = "task=task.json"


advise = functools.partial(script, "advise")


@pytest.fixture
def folder(task_json: Path) -> Path:
    return task_json.parent


def test_what_to_rent(folder):
    prices = ["prices.h100=2.5", "prices.l40s=1", "samples=1e9", "out=advice"]
    sizes = ["hardware=[h100,l40s]", "ranks=[1,3,12]", "batch_per_rank=64"]
    done = advise(folder, TASK, "sharder=size_lookup", *sizes, *prices)
    shown = done.output
    assert "h100 is h100_sxm, 56 of 80 GiB for tables: predicted by prior, within about" in shown
    assert "| price per epoch |" in shown
    assert "h100 with sharder=size_lookup scales up to" in shown
    assert "advice: rent " in shown
    written = json.loads((folder / "advice" / "advice.json").read_text())
    assert written["objective"] == "price"
    rows = written["candidates"]
    assert [(row["hardware"], row["ranks"]) for row in rows] == [
        (hardware, ranks) for hardware in ("h100", "l40s") for ranks in (1, 3, 12)
    ]
    fitting = [row for row in rows if row["fits"]]
    assert len(fitting) == 4
    assert {row["reason"] for row in rows if not row["fits"]} == {"12 ranks do not fill hosts of 8"}
    for row in fitting:
        assert sum(row[f"{part}_ms"] for part in PARTS) == pytest.approx(row["step_ms"])
    best = min(fitting, key=lambda row: row["price"])
    task = read_task(folder / "advice" / "task.json")
    assert (task.topology.world_size, task.batch_size) == (best["ranks"], best["batch_size"])
    validate(read_plan(folder / "advice" / "plan.json"), task)
    with (folder / "advice" / "advice.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)


def test_which_sharder(folder):
    """One that fails is a row with the reason."""
    sharders = "sharder=[random,plan_file,size_lookup]"
    done = advise(folder, TASK, sharders, "ranks=3", "batch_size=96", "exchange_precision=fp16")
    shown = done.output
    assert "| plan_file | no: sharder.path is not set | - |" in shown
    assert "advice: use sharder=" in shown
    assert "overrides: sharder=" in shown
    assert " exchange_precision=fp16 (" in shown
    assert sorted(path.name for path in folder.iterdir()) == ["task.json"]


def test_this_machine(folder):
    done = advise(folder, TASK, "hardware=cpu", "ranks=[1]", "batch_size=64", "sharder=dim")
    shown = done.output
    assert "cpu is this machine's CPUs" in shown
    assert "dense: measured on this machine, one rank alone" in shown
    assert "scales up to" not in shown, "one size only"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "name either task=task.json or data="),
        ([TASK, "hardware=h101"], "hardware is 'h101'; known are cpu, here, v100"),
        ([TASK, "hardware=[]"], "hardware is [], must be a name or a list of names"),
        ([TASK, "ranks=[8,-1]"], "ranks is -1, must be an integer from 1"),
        ([TASK, "ranks=[8,8]", "batch_size=64"], "ranks has 8 twice"),
        ([TASK, "ranks=[5]", "batch_size=64"], "batch_size is 64; it is global and must be"),
        ([TASK, "batch_size=64", "batch_per_rank=8"], "set batch_size or batch_per_rank"),
        ([TASK, "prices.h200=2"], "prices.h200 is stated, but hardware is h100"),
        ([TASK, "prices=2"], "prices is 2; state a price for each GPU"),
        ([TASK, "sharder=[]"], "sharder is an empty list"),
        ([TASK, "sharder=[dim,foo]"], "known: autoshard, autoshard_portfolio, dim"),
        ([TASK, "topology.ranks_per_host=x"], "topology.ranks_per_host is 'x'"),
        ([TASK, "prices.h101=2"], "known there: a10, a100"),
        ([TASK, "sharder=[dim,size]", "sharder.seed=1"], "sharder.* needs one sharder"),
        ([TASK, "out=task.json"], "out is 'task.json', but task.json is not a folder"),
    ],
    ids=lambda value: None if isinstance(value, str) else "+".join(value) or "nothing",
)
def test_bad_input(folder, overrides, message):
    done = advise(folder, *overrides, exit_code=2)
    assert message in done.output
    assert sorted(path.name for path in folder.iterdir()) == ["task.json"]


def test_nothing_fits(folder):
    small = f"topology.memory_gib={1000 / GIB}"
    sizes = ["hardware=[h100,l40s]", "ranks=[1,3]", "batch_size=96", "sharder=dim", "out=advice"]
    done = advise(folder, TASK, small, *sizes, exit_code=2)
    shown = done.output
    assert "no case has a plan" in shown
    assert "h100, dim: 0.0 GiB of tables exceed the memory of 3 ranks by 0.0 GiB" in shown
    assert "l40s, dim: " in shown
    assert not (folder / "advice").exists()


def test_every_gpu_can_have_a_price():
    prices = OmegaConf.load(CONF_DIR / "advise.yaml").prices
    assert set(prices) == {*CPU_NAMES, *gpu_names()}
    assert set(prices.values()) == {None}
