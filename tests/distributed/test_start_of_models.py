"""A TorchRec model is planned by the costs of its hardware, which its ranks measure first."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_sharded import ShardedPlanner, plan_model
from dlrm_sharded.calibration.hardware_costs import samples_of
from dlrm_sharded.calibration.sample_store import conditions_of, sample_store
from dlrm_sharded.drop_in.run_costs import context_of_topology
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.hardware import probing
from dlrm_sharded.model.fused_optimizers import fuse
from dlrm_sharded.ranks.distributed import Rank
from tests.first_runs import count_measurements
from tests.preloaded.ranks import gathered, run_ranks
from tests.unit.calibration.cases import ELSEWHERE, on_other_hardware
from tests.unit.cost.hardware import measured_plans
from tests.unit.drop_in.synthetic import bags
from tests.unit.hardware.test_torch_defaults import set_everything, switches

pytestmark = pytest.mark.slow


STARTS = {"not fused": 14, "too short": 1, "prior": None, "journal": None}
STARTS |= {"measured": 14, "again": 14}
"""Plans, and the seconds that each may measure before."""


def plan_after_setting_everything(rank: Rank, cache: str) -> list[Any]:
    """Plan with each kind of costs, on hardware that nobody has costs of.

    Return what every rank found: the kind of the costs, the ranks of the tables, the number of
    measurements so far (each counts as a second) and the switches that have changed; and those
    switches that the probe had.
    """
    os.environ |= {"ONEDNN_MAX_CPU_ISA": "DEFAULT", "DLRM_SHARDED_CACHE": cache}
    os.environ["DLRM_SHARDED_JOURNAL"] = journal = f"{cache}/journal"
    measured = count_measurements()
    set_everything()
    probed, found, fastest_s = [], {}, probing._fastest_s

    def noting(*arguments: Any, **options: Any) -> list[float]:
        shown = ("new tensors", "deterministic")
        probed.append({key: switches()[key] for key in shown})
        return fastest_s(*arguments, **options)

    probing._fastest_s = noting
    for start, budget_s in STARTS.items():
        model, before = bags(), switches()
        if start != "not fused":
            fuse("rowwise_adagrad", model.parameters(), 0.1)
        options = {} if budget_s is None else {"calibrate": budget_s}
        plan, report = plan_model(model, batch_size=64, patience=1, **options)
        changed = [key for key, value in switches().items() if before[key] != value]
        placed = {name: list(table.ranks) for name, table in plan.plan[""].items()}
        found[start] = (report.details.provenance, placed, len(measured), changed)
        if start == "prior" and rank.is_zero:
            context = context_of_topology(report.task.topology, "rowwise_adagrad")
            for run in on_other_hardware(measured_plans(12, 0, seed=5), ELSEWHERE):
                store = sample_store(context, journal)
                assert store.append(conditions_of(context), dataclasses.replace(run, kind="run"))
    samples = samples_of(context_of_topology(report.task.topology, "rowwise_adagrad"), journal)
    kinds = {(sample.kind, sample.world_size) for sample in samples.values()}
    return gathered(rank, (found, probed, kinds))


def test_ranks_measure_once_and_keep_what_their_user_has_set(tmp_path: Path) -> None:
    """Without a fused optimizer nothing is measured, and the second time neither.

    Too few plans change nothing, as on a machine where the time is over at once.
    """
    first, (other, *_) = run_ranks(plan_after_setting_everything, 2, str(tmp_path))
    found, [probe, *_], kinds = first
    assert other == found
    provenances, measured = ({start: of[i] for start, of in found.items()} for i in (0, 2))
    assert not any(changed for *_, changed in found.values())
    assert {provenances[start].kind for start in ("not fused", "too short", "prior")} == {"prior"}
    assert provenances["journal"].num_runs > 0
    assert [provenances[start].kind for start in ("measured", "again")] == ["measured"] * 2
    assert measured["not fused"] == 0
    assert measured["too short"] == measured["journal"] <= 2
    assert measured["again"] == measured["measured"] >= measured["journal"] + 8
    assert {kind for kind, _ in kinds} == {"computation", "communication", "run"}
    assert {world_size for kind, world_size in kinds if kind == "communication"} == {2}
    assert probe["new tensors"][0] == torch.float32
    assert probe["deterministic"] == (False, False)


@pytest.mark.parametrize("seconds", [0, -1, "20", 10_000])
def test_seconds_are_checked(seconds: Any) -> None:
    with pytest.raises(ConfigError, match=r"calibrate is .*; it must be a number > 0, <= 3600"):
        ShardedPlanner(calibrate=seconds)
