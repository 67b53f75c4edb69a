"""Calibrates the cost model, and compares it with the packaged prices on plans that neither saw."""

from __future__ import annotations

from bring_up.steps import MAIN_ERROR
from dlrm_sharded.cost.learned import shipped_prior
from dlrm_sharded.fitting.calibrate import FitConfig, predictor, split_held_out
from dlrm_sharded.fitting.costs_file import read_costs
from dlrm_sharded.fitting.evaluate import compare
from dlrm_sharded.hardware.artifact import CALIBRATED
from dlrm_sharded.hardware.context import RunContext
from first_hour import collect
from first_hour.fit import fitted_meta
from studies.processes import module_command
from studies.study import StudyRun

CALIBRATE = ("dlrm_sharded.commands.calibrate", "minutes=2")
SMALL_SIZES = (*collect.SMALL_SIZES, "num_ranks=2", "collect.time_budget_s=20", "fit.num_steps=100")
COSTS = CALIBRATED / "costs.parquet"

META = ("hardware", "num_plans", "held_out_errors", "repeatability", "load_average")


def run(study: StudyRun) -> None:
    study.device(or_cpu=True)
    command = module_command(*CALIBRATE, *(SMALL_SIZES if study.small else ()))
    meta = fitted_meta(study, command, noun="calibration", keys=META)
    if meta is None:
        return
    packaged = _packaged_errors(FitConfig(**meta["fit"]))
    study.record("packaged_errors", packaged)
    calibrated = meta["held_out_errors"]
    study.show(
        plans=str(sum(meta["num_plans"].values())),
        error=f"{calibrated[MAIN_ERROR]['mape']:.1f} %",
        packaged=f"{packaged[MAIN_ERROR]['mape']:.1f} %",
    )


def _packaged_errors(config: FitConfig) -> dict[str, dict[str, float]]:
    """Return the errors of the prices without a calibration, on the plans that the fit held out."""
    costs = read_costs(COSTS)
    manifest = costs.manifest
    prior = shipped_prior(RunContext(manifest["device"], costs.hardware, manifest["optimizer"]))
    _, held_out = split_held_out(costs, config, has_prior=True)
    pairs_by_name = compare(predictor(prior), held_out)
    return {name: pairs.summary() for name, pairs in pairs_by_name.items()}
