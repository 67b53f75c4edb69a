"""Trains with a few sharders under the calibrated model, and compares the runs.

A sweep that was ended is continued: only the runs that it lacks are started.
"""

from __future__ import annotations

from pathlib import Path

from dlrm_sharded.ranks.gpus import visible_gpus
from dlrm_sharded.runs import compare
from dlrm_sharded.runs.comparison import Comparison
from studies.processes import module_command
from studies.study import StudyRun

SHARDERS = ("random", "size_lookup", "torchrec", "autoshard", "neuroshard")
SMALL_SHARDERS = ("size_lookup", "neuroshard")
NUM_CPU_RANKS = 2
SMALL_SIZES = (
    *("batch_size=256", "data.max_rows=500", "trainer.num_steps=12", "measure.iterations=3"),
    *("trainer.log_every_steps=4", "journal=none"),
)
FOLDER = Path("sweep")
FIGURES = ("embedding_cost_ms", "imbalance", "samples_per_s", "prediction_error")


def run(study: StudyRun) -> None:
    on_cuda = study.device(or_cpu=True).type == "cuda"
    num_ranks = len(visible_gpus()) if on_cuda else NUM_CPU_RANKS
    sizes = SMALL_SIZES if study.small else ("experiment=gpu_demo",) if on_cuda else ()
    sharders = SMALL_SHARDERS if study.small else SHARDERS
    command = module_command(
        *("dlrm_sharded.train", "-m", f"sharder={','.join(sharders)}"),
        *(f"hydra.sweep.dir={FOLDER.resolve()}", f"hydra.launcher.j=1x{num_ranks}", *sizes),
    )
    study.checked_command(command, noun="the sweep")
    study.record("num_ranks", num_ranks)
    if FOLDER.exists():
        _record(study, compare([FOLDER], FOLDER))


def _record(study: StudyRun, comparison: Comparison) -> None:
    """Keep the figures of every sharder in the order of the comparison."""
    rows = {}
    for row in comparison.rows:
        study.check(len(row.results) == len(row.runs), f"{row.sharder}: a run did not succeed")
        means = {name: row.figures[name].mean for name in FIGURES if name in row.figures}
        rows[row.sharder] = means | {"prices": [result.prices for result in row.results]}
        if "embedding_cost_ms" in means:
            study.show(**{row.sharder: f"{means['embedding_cost_ms']:.2f} ms"})
    study.record("sharders", rows)
