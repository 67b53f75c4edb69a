"""Evaluates a checkpoint on held-out files, and writes the scores of their rows."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_sharded.checkpoint.manifest import Manifest
from dlrm_sharded.checkpoint.restore import load_weights
from dlrm_sharded.datasets.held_out import HeldOutDataset, Window
from dlrm_sharded.files.errors import InvalidPlanError
from dlrm_sharded.files.json_files import replaced_file
from dlrm_sharded.files.progress_bar import ProgressBar
from dlrm_sharded.hardware.detect import context_of_job
from dlrm_sharded.job.build import build
from dlrm_sharded.job.settings import JobSettings
from dlrm_sharded.plans.plan import ShardingPlan, with_precisions
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.agreement import on_rank_zero, patiently_on_rank_zero
from dlrm_sharded.ranks.device_memory import with_memory_of_all_ranks
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.metrics import Evaluation, Evaluator

log = logging.getLogger(__name__)


SCORED = "scored.bin"
"""File of the scored rows: the logit and the label of each, as a pair of fp32."""

PAIR_BYTES = 8


@dataclass(frozen=True)
class Scoring:
    """Scores the rows of held-out files with the weights of a checkpoint.

    Args:
        folder: where rank 0 keeps scored rows, with which a killed evaluation continues.
    """

    settings: JobSettings
    rank: Rank
    manifest: Manifest
    data: HeldOutDataset
    folder: Path

    def run(self) -> Evaluation:
        """Score all rows; a collective of all ranks.

        Returns:
            The evaluation, which is meaningless if the files have no labels.
        """
        rank, data = self.rank, self.data
        model = self._model().eval()
        evaluator = Evaluator(rank.device)
        first = on_rank_zero(lambda: self._num_done(evaluator))
        bar = ProgressBar(
            total=data.num_rows,
            initial=first,
            unit="rows",
            desc="scoring",
            disable=not rank.is_zero,
        )
        with torch.no_grad(), bar:
            for windows in data.windows(first, world_size=rank.world_size):
                _, (_, logits, labels) = model(data.read(windows[rank.rank]).to(rank.device))
                pairs = torch.stack([logits, labels], dim=1)
                evaluator.update(*pairs[windows[rank.rank].skip :].T)
                of_ranks = [torch.empty_like(pairs) for _ in windows]
                dist.all_gather(of_ranks, pairs)
                if rank.is_zero:
                    bar.update(self._write(of_ranks, windows))
        return evaluator.compute()

    def _model(self) -> torch.nn.Module:
        """Return the sharded model, with the weights of the checkpoint."""
        settings, rank = self.settings, self.rank
        topology = with_memory_of_all_ranks(settings.topology)
        task = on_rank_zero(lambda: settings.task(topology))
        context = context_of_job(rank, settings.optimizer.embedding)
        plan = patiently_on_rank_zero(lambda: self._plan(task, context))
        built = build(settings, rank, plan, with_precisions(task, plan))
        load_weights(self.manifest, built.state)
        return built.model

    def _plan(self, task: ShardingTask, context: Any) -> ShardingPlan:
        """Return the checkpoint's plan if it fits these ranks, or a new one; rank 0 calls this."""
        planner, state = self.settings.planner.planner(context), self.manifest.state
        if state.world_size == task.topology.world_size:
            try:
                plan = ShardingPlan.from_json(state.plan)
                return planner.adopt(plan, task, solve_s=0.0)[0]
            except InvalidPlanError as error:
                log.info("the checkpoint's plan does not fit (%s); a new one is made", error)
        return planner.plan(task)[0]

    def _num_done(self, evaluator: Evaluator) -> int:
        """Return the number of rows scored earlier, and add them to the evaluator; for rank 0."""
        path = self.folder / SCORED
        path.touch()
        num_done = path.stat().st_size // PAIR_BYTES
        os.truncate(path, num_done * PAIR_BYTES)  # a killed process may have written half a pair
        evaluator.update(*self._scored(0, num_done).to(self.rank.device).T)
        return num_done

    def _write(self, of_ranks: Sequence[Tensor], windows: Sequence[Window]) -> int:
        """Append the pairs of the rows that count, and return the number of rows."""
        pairs = torch.cat([of[w.skip :] for of, w in zip(of_ranks, windows, strict=True)])
        with (self.folder / SCORED).open("ab") as file:
            file.write(pairs.cpu().numpy().tobytes())
        return len(pairs)

    def _scored(self, first: int, num_rows: int) -> Tensor:
        """Return [num_rows, 2], the logits and labels of rows."""
        path, offset = self.folder / SCORED, first * PAIR_BYTES
        found = np.fromfile(path, np.float32, count=2 * num_rows, offset=offset)
        return torch.from_numpy(found.reshape(-1, 2))

    def write_scores(self, path: Path) -> None:
        """Write the keys and the probability of each row, in the order of the files' rows."""
        named, first = [], 0
        for number, part in enumerate(self.data.parts):
            if not part.num_rows:
                continue
            logits = self._scored(first, part.num_rows)[:, 0]
            first += part.num_rows
            frame = self.data.keys(number).with_columns(
                score=logits.double().sigmoid().float().numpy()
            )
            named.append(self.folder / f"named-{number:05}.parquet")
            frame.write_parquet(named[-1])
        with replaced_file(path) as file:  # files may differ in the types of their keys
            frames = [pl.scan_parquet(of_part, glob=False) for of_part in named]
            pl.concat(frames, how="vertical_relaxed").sink_parquet(file, maintain_order=True)


def metrics_json(scoring: Scoring, evaluation: Evaluation, *, with_label: bool) -> dict[str, Any]:
    """Return the content of metrics.json."""
    state, data = scoring.manifest.state, scoring.data
    metrics = dataclasses.asdict(evaluation) if with_label else {}
    return {
        "run": state.run,
        "step": state.step,
        "checkpoint": str(scoring.manifest.folder),
        "files": [str(path) for path in data.paths],
        "num_rows": data.num_rows,
        "num_malformed": data.num_malformed,
        **{key: value for key, value in metrics.items() if key != "num_samples"},
        "unseen_share": data.unseen_shares(),
    }
