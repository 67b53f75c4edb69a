"""Decides where a run begins: at its own checkpoint, at another run's, or at the first step."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dlrm_sharded.checkpoint.folder import (
    FOLDER_KEY,
    FOLDER_NAME,
    checkpoint_path,
    checkpoints,
    is_checkpoint,
)
from dlrm_sharded.checkpoint.manifest import Manifest, RunState, check_parts, read_manifest
from dlrm_sharded.checkpoint.storage import check_finite
from dlrm_sharded.files.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    InvalidPlanError,
    UserError,
)
from dlrm_sharded.files.json_files import read_json_object, write_json
from dlrm_sharded.files.remote_files import Location, location
from dlrm_sharded.files.renamed import with_present_target
from dlrm_sharded.job.owned_folder import RunFolder
from dlrm_sharded.job.settings import JobSettings
from dlrm_sharded.job.trained_config import refused_and_changed
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.ranks.agreement import all_or_none, on_rank_zero
from dlrm_sharded.ranks.attempt import is_restart
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.ranks.job_store import listed
from dlrm_sharded.runs.owner import refuse_former_run
from dlrm_sharded.runs.remote_copy import RUN_FILE
from dlrm_sharded.runs.result import FILE_NAME as RESULT_FILE
from dlrm_sharded.training.trainer import TrainerConfig

log = logging.getLogger(__name__)

PLANNING = ("sharder", "cost_model", "topology", "exchange_precision")
"""Keys of the config that decide a plan: while they do not change, a run keeps its plan."""


@dataclass(frozen=True, slots=True)
class Start:
    """Describes where a run begins.

    Args:
        run: id of the run.
        num_interruptions: number of earlier starts in the run's folder.
        resumed: checkpoint from which all state is taken; None to begin at the first step.
        weights: checkpoint from which only weights are taken; None for none.
        damaged: checkpoints in the run's folder that are skipped because they are damaged.
    """

    run: str
    num_interruptions: int = 0
    resumed: Manifest | None = None
    weights: Manifest | None = None
    damaged: tuple[Location, ...] = ()

    @property
    def step(self) -> int:
        return 0 if self.resumed is None else self.resumed.state.step

    @property
    def own_state(self) -> RunState | None:
        """The state in this run's own checkpoint; None if the run does not begin there."""
        state = None if self.resumed is None else self.resumed.state
        return state if state is not None and state.run == self.run else None

    @property
    def event_position(self) -> tuple[str, int] | None:
        """Event file to continue, and its length; None for a new file."""
        return None if self.own_state is None else self.own_state.events

    def goes_on_alike(self, config: Mapping[str, Any]) -> bool:
        """Return whether the run continues from its own checkpoint with the same config."""
        own = self.own_state
        return own is not None and _lasting(config) == _lasting(own.config)

    def plan_to_keep(self, config: Mapping[str, Any], world_size: int) -> ShardingPlan | None:
        """Return the checkpoint's plan if neither the keys of `PLANNING` nor the ranks changed."""
        if self.resumed is None or self.resumed.state.world_size != world_size:
            return None
        now, written = _lasting(config), _lasting(self.resumed.state.config)
        if not all(_decide_alike(written.get(group), now.get(group)) for group in PLANNING):
            return None
        return self.checkpoint_plan()

    def checkpoint_plan(self) -> ShardingPlan | None:
        """Return the checkpoint's plan; None if there is none, or this release cannot read it."""
        if self.resumed is None:
            return None
        try:
            return ShardingPlan.from_json(self.resumed.state.plan)
        except InvalidPlanError:  # such as plans of 0.2 with tables in host memory
            return None


def _lasting(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the keys of a single start: resuming, sweep, first measurement."""
    of_a_start = {"resume", "cost_model_snapshot", "calibrate", "snapshot"}
    of_a_start.add("price_snapshot")  # what 0.2 called the snapshot of the cost model
    lasting = {key: config[key] for key in config if key not in of_a_start}
    if isinstance(model := config.get("cost_model"), Mapping):
        lasting["cost_model"] = {key: model[key] for key in model if key not in of_a_start}
    return lasting


def _decide_alike(written: Any, now: Any) -> bool:
    """Return whether two values of a config group decide the same plan.

    Versions add and remove keys of a group, so a key that only one of the values has is ignored.
    """
    if isinstance(written, Mapping) and isinstance(now, Mapping):
        written = with_present_target(written)
        return all(written[key] == now[key] for key in written.keys() & now.keys())
    return bool(written == now)


def find_start(settings: JobSettings, rank: Rank, folder: RunFolder) -> Start:
    """Return where the run begins; a collective of all ranks.

    Raises:
        CheckpointError: a named checkpoint is damaged; or the folder has checkpoints, but none is
            usable; or the checkpoint was trained with another config, see `job.trained_config`.
        ConfigError: the folder holds a run that is not to be resumed.
    """
    mode = on_rank_zero(lambda: _mode(settings.resume, folder))
    if mode == "auto" and folder.copy is not None:
        on_rank_zero(folder.copy.pull)
    run, num_starts = on_rank_zero(lambda: _noted_run(folder))
    resumed, weights = None, None
    damaged: tuple[Location, ...] = ()
    if mode == "auto":
        resumed, damaged = _newest_good(
            folder.checkpoints_in,
            rank,
            run=run,
            remedy=f"; move {folder.checkpoints_in / FOLDER_NAME} away to begin at the first step, "
            "or start in another hydra.run.dir, with resume=PATH for a checkpoint elsewhere",
        )
    elif mode != "never":
        resumed = _named(mode, rank, key="resume")
    if settings.init_from is not None and resumed is None:
        weights = _named(str(settings.init_from), rank, key="init_from")
    if resumed is not None:
        with all_or_none():
            _check_same_training(resumed, settings.config, logs=rank.is_zero)
    return Start(run, num_starts, resumed, weights, damaged)


def check_length(start: Start, trainer: TrainerConfig, epoch_batches: int) -> None:
    """Check that a run may continue from its checkpoint, by the length of epochs and of the run.

    Raises:
        CheckpointError: the number of batches has changed, or the run ends before the checkpoint.
    """
    if start.resumed is None:
        return
    folder, state = start.resumed.folder, start.resumed.state
    if state.epoch_batches != epoch_batches:
        raise CheckpointError(
            f"{folder} was trained on epochs of {state.epoch_batches:,} batches, the data now has "
            f"{epoch_batches:,}, in another order; take the weights alone with init_from"
        )
    total = trainer.total_steps(epoch_batches)
    if state.step > total:
        raise CheckpointError(
            f"{folder} was trained for {state.step:,} steps, and the run ends after {total:,}; "
            "raise trainer.num_steps or trainer.num_epochs"
        )


def note_start(run_dir: Path, start: Start, world_size: int) -> None:
    """Record the start, and remove what an interrupted run wrote after its checkpoint."""
    noted = _read_notes(run_dir) if start.num_interruptions else None
    starts = [] if noted is None else noted["starts"]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    entry = {"at": now, "step": start.step, "world_size": world_size}
    write_json(run_dir / RUN_FILE, {"run": start.run, "starts": [*starts, entry]})
    if start.num_interruptions:
        kept = start.event_position
        for path in run_dir.glob("events.out.tfevents.*"):
            if kept is None or path.name != kept[0]:
                path.unlink()
        (run_dir / RESULT_FILE).unlink(missing_ok=True)
    if start.resumed is not None:
        log.info("resuming at step %d from %s", start.step, start.resumed.folder)
    elif start.num_interruptions:
        log.info("there is no checkpoint to resume from, so the run begins at its first step")
    if start.weights is not None:
        log.info("initial weights are those of %s", start.weights.folder)


def _mode(resume: object, folder: RunFolder) -> str:
    """Return "auto", "never" or the path of a checkpoint."""
    if resume is None:
        resume = "auto" if is_restart() else "never"
    if not isinstance(resume, str) or not resume:
        raise ConfigError(f"resume is {resume!r}; give auto, never or the path of a checkpoint")
    refuse_former_run(folder.path, resume)
    refuse_former_run(folder.checkpoints_in, resume, key=FOLDER_KEY)
    return resume


def _read_notes(run_dir: Path) -> dict[str, Any] | None:
    """Return the content of run.json; None if it is missing or damaged."""
    with contextlib.suppress(UserError):
        noted = read_json_object(run_dir / RUN_FILE, noun="run")
        if isinstance(noted.get("run"), str) and isinstance(noted.get("starts"), list):
            return noted
    return None


def _noted_run(folder: RunFolder) -> tuple[str, int]:
    """Return the id of the run and the number of its starts so far (1 if only checkpoints tell)."""
    if (noted := _read_notes(folder.path)) is not None:
        return noted["run"], len(noted["starts"])
    for path in checkpoints(folder.checkpoints_in):
        with contextlib.suppress(CheckpointError):
            return read_manifest(path).state.run, 1
    return uuid.uuid4().hex, 0


def _newest_good(
    run_dir: Location, rank: Rank, *, run: str | None = None, key: str = "", remedy: str = ""
) -> tuple[Manifest | None, tuple[Location, ...]]:
    """Return the newest usable checkpoint, and newer ones that are damaged.

    Args:
        run: id that it must have; None for any.
        key, remedy: beginning and end of the error's message.

    Raises:
        CheckpointError: there are checkpoints, but none is usable.
    """
    errors: dict[Location, CheckpointError] = {}
    for path in on_rank_zero(lambda: checkpoints(run_dir)):
        try:
            manifest = _checked(path, rank)
            if run is not None and manifest.state.run != run:
                raise CheckpointError(f"{path} belongs to another run")
            own_path = checkpoint_path(run_dir, manifest.state.step)
            if path.name != own_path.name:  # renamed, or a link: later ones would not count
                raise CheckpointError(f"{path} is the checkpoint of {own_path.name}; rename it")
            damaged = (p for p, why in errors.items() if isinstance(why, DamagedCheckpointError))
            return manifest, tuple(damaged)
        except CheckpointError as error:
            if rank.is_zero:
                log.warning("skipped a checkpoint: %s", error)
            errors[path] = error
    with all_or_none():
        if errors:
            raise CheckpointError(
                f"{key}no checkpoint in {run_dir / FOLDER_NAME} can be used ({len(errors)} found); "
                f"the newest: {next(iter(errors.values()))}{remedy}"
            )
    return None, ()


def _named(name: str, rank: Rank, *, key: str) -> Manifest:
    """Return the checkpoint at this path, or the newest usable one of the run in this folder."""
    with all_or_none():
        path = location(key, name)
    if on_rank_zero(lambda: is_checkpoint(path)):
        return _checked(path, rank)
    found, _ = _newest_good(path, rank, key=f"{key}: ")
    with all_or_none():
        if found is None:
            raise CheckpointError(
                f"{key} is {str(path)!r}, which is neither a checkpoint nor a run's folder with one"
            )
    return found


def _checked(path: Location, rank: Rank) -> Manifest:
    """Return the manifest of a checkpoint, after all ranks together have checked its parts."""
    manifest = on_rank_zero(lambda: read_manifest(path))
    with all_or_none():
        check_parts(manifest, share=rank.rank, num_shares=rank.world_size)
        check_finite(manifest, share=rank.rank, num_shares=rank.world_size)
    return manifest


def _check_same_training(manifest: Manifest, config: Mapping[str, Any], *, logs: bool) -> None:
    """Check that the checkpoint was trained with a compatible config; log allowed differences."""
    refused, changed = refused_and_changed(manifest.state.config, config)
    if refused:
        raise CheckpointError(
            f"{manifest.folder} was trained with another config: {listed(refused, ', ')}; resume "
            "with that of the checkpoint, or take the weights alone with init_from"
        )
    if changed and logs:
        texts = listed(changed, ", ")
        log.warning("from %s on, the run has another config: %s", manifest.folder.name, texts)
