"""Evaluates a checkpoint on held-out files, and writes the scores of their rows."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_sharded.checkpoint.manifest import Manifest
from dlrm_sharded.checkpoint.restore import load_weights
from dlrm_sharded.datasets.held_out import HeldOutDataset
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


@dataclass(frozen=True)
class Scoring:
    """Scores the rows of held-out files with the weights of a checkpoint, part by part.

    Args:
        folder: where the logits of complete parts are, for a scoring that goes on; None to keep
            none.
    """

    settings: JobSettings
    rank: Rank
    manifest: Manifest
    data: HeldOutDataset
    folder: Path | None

    def run(self) -> Evaluation:
        """Score all rows; a collective of all ranks.

        Returns:
            The evaluation, which counts for nothing if the files have no labels.
        """
        rank, data = self.rank, self.data
        model = self._model()
        evaluator = Evaluator(rank.device)
        num_done = on_rank_zero(lambda: self._num_done(evaluator))
        first = sum(part.num_rows for part in data.parts[:num_done])
        waiting: list[Tensor] = []
        where = {"rank": rank.rank, "world_size": rank.world_size}
        model.eval()
        with (
            torch.no_grad(),
            ProgressBar(
                total=data.num_rows,
                initial=first,
                unit="rows",
                desc="scoring",
                disable=not rank.is_zero,
            ) as bar,
        ):
            for window in data.windows(first, **where):
                batch = data.read(window, world_size=rank.world_size).to(rank.device)
                _, (_, logits, labels) = model(batch)
                counted = slice(window.skip, window.skip + window.count)
                evaluator.update(logits[counted], labels[counted])
                waiting += self._gathered(torch.stack([logits, labels]), window.skip, window.count)
                bar.update(min(data.batch_size, data.num_rows - bar.n))
                if rank.is_zero and self.folder is not None:
                    waiting, num_done = self._write_parts(waiting, num_done)
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
        """Return the checkpoint's plan if it fits these ranks, or a new one; rank 0 calls it."""
        planner, state = self.settings.planner.planner(context), self.manifest.state
        if state.world_size == task.topology.world_size:
            try:
                plan = ShardingPlan.from_json(state.plan)
                return planner.adopt(plan, task, solve_s=0.0)[0]
            except InvalidPlanError as error:
                log.info("the checkpoint's plan does not fit (%s); a new one is made", error)
        return planner.plan(task)[0]

    def _gathered(self, found: Tensor, skip: int, count: int) -> list[Tensor]:
        """Return logits and labels [2, N] of the rows of all ranks that count, on rank 0."""
        if self.folder is None:
            return []
        counts = torch.tensor([skip, count], device=found.device)
        all_found = [torch.empty_like(found) for _ in range(self.rank.world_size)]
        all_counts = [torch.empty_like(counts) for _ in range(self.rank.world_size)]
        dist.all_gather(all_found, found.contiguous())
        dist.all_gather(all_counts, counts)
        pairs = zip(all_found, all_counts, strict=True)
        return [of[:, s : s + n].cpu() for of, (s, n) in pairs] if self.rank.is_zero else []

    def _write_parts(self, waiting: list[Tensor], num_done: int) -> tuple[list[Tensor], int]:
        """Write the parts whose rows are all scored; return what is left."""
        assert self.folder is not None
        parts = self.data.parts
        if num_done < len(parts) and sum(of.shape[1] for of in waiting) >= parts[num_done].num_rows:
            found = torch.cat(waiting, dim=1) if waiting else torch.empty(2, 0)
            while num_done < len(parts) and found.shape[1] >= parts[num_done].num_rows:
                of_part, found = found.split(
                    [parts[num_done].num_rows, found.shape[1] - parts[num_done].num_rows], dim=1
                )
                logits, labels = of_part.numpy()
                with replaced_file(self._part_path(num_done)) as file:
                    pl.DataFrame({"logit": logits, "label": labels}).write_parquet(file)
                num_done += 1
            waiting = [found]
        return waiting, num_done

    def _num_done(self, evaluator: Evaluator) -> int:
        """Return the number of parts that are scored, and count them; rank 0 calls it."""
        number = 0
        while self.folder is not None and self._part_path(number).exists():
            done = pl.read_parquet(self._part_path(number))
            logits, labels = (torch.tensor(done[name].to_numpy()) for name in done.columns)
            evaluator.update(logits.to(self.rank.device), labels.to(self.rank.device))
            number += 1
        return number

    def write_scores(self, path: Path) -> None:
        """Write what names each row, and its probability, in the order of the files' rows."""
        assert self.folder is not None
        named = []
        for number, part in enumerate(self.data.parts):
            if not part.num_rows:
                continue
            logits = pl.read_parquet(self._part_path(number))["logit"].to_numpy()
            scores = torch.tensor(logits).double().sigmoid().float().numpy()
            frame = self.data.keys(number).with_columns(score=scores)
            named.append(self.folder / f"named-{number:05}.parquet")
            frame.write_parquet(named[-1])
        with replaced_file(path) as file:  # files may differ in the types of their keys
            frames = [pl.scan_parquet(of_part, glob=False) for of_part in named]
            pl.concat(frames, how="vertical_relaxed").sink_parquet(file, maintain_order=True)

    def _part_path(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"scores-{number:05}.parquet"


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
