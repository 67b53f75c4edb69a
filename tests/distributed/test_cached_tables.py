"""Nothing is lost or stale of tables whose rows a device caches: all that reads or writes weights.

On a CPU the caches are those of `tests.cached_lookups`, and each trained model is compared with one
without caches, bit for bit. `tests/gpu` does the same with the caches of FBGEMM.
"""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dlrm_sharded.checkpoint.export import DENSE_FILE, export
from dlrm_sharded.checkpoint.folder import checkpoints
from dlrm_sharded.checkpoint.manifest import Manifest, check_parts, read_manifest
from dlrm_sharded.checkpoint.model_state import ModelState, model_state
from dlrm_sharded.checkpoint.restore import RANK_PREFIX, load_model, load_weights, load_whole
from dlrm_sharded.checkpoint.saver import CheckpointConfig, Saver
from dlrm_sharded.measuring.measure import MeasureConfig, measure
from dlrm_sharded.model.replicas import replica_part
from dlrm_sharded.model.sharded_model import sharded_embeddings
from dlrm_sharded.plans.plan import with_load_factors
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.checkpoints import Checkpoints
from dlrm_sharded.training.pipeline import evaluate, make_pipeline
from dlrm_sharded.training.progress import Progress
from tests.cached_lookups import RowCache, cached_lookups
from tests.distributed.small_model import TABLES, make_plan, make_sharded, shares
from tests.preloaded.ranks import gathered, run_ranks
from tests.unit.checkpoint.cases import run_state

EMBEDDING = "rowwise_adagrad"
LOAD_FACTOR = 0.2
"""Share of the rows that FBGEMM caches on a GPU; it rounds up to sets of 32."""

BATCHES = 2 * [0, 1, 2]


class Trained:
    """A small model that is trained, measured, saved and loaded as a run does it."""

    def __init__(self, rank: Rank, kind: str, *, is_cached: bool) -> None:
        self._rank = rank
        plan = make_plan(kind, rank.world_size)
        if is_cached and rank.device.type == "cuda":
            plan = with_load_factors(plan, {table.name: LOAD_FACTOR for table in TABLES})
        self._model, self._optimizer = make_sharded(rank, kind, EMBEDDING, shards=plan.shards)
        self._state: ModelState = model_state(
            self._model, self._optimizer, plan, TABLES, embedding_optimizer=EMBEDDING
        )
        self._batches = shares(rank)

    def train(self, first: int, last: int) -> list[float]:
        """Train some of the batches; return the losses."""
        steps = self._pipeline()
        stream = iter([self._batches[number] for number in BATCHES[first:last]])
        return [float(steps.progress(stream)[0]) for _ in range(first, last)]

    def evaluate(self) -> float:
        found = evaluate(self._model, self._pipeline(), self._batches, self._rank.device)
        assert found is not None
        assert found.normalized_entropy is not None
        return found.normalized_entropy

    def _pipeline(self) -> Any:
        return make_pipeline("base", self._model, self._optimizer, self._rank.device)

    def measure(self) -> None:
        measure(
            sharded_embeddings(self._model),
            [batch.sparse_features for batch in self._batches],
            MeasureConfig(iterations=3, warmup=1),
            replica_optimizer=replica_part(self._optimizer),
        )

    def save(self, folder: Path, *, background: bool = True) -> None:
        """Write a checkpoint, and go on training before it is written in the background."""
        state, config = self._state, CheckpointConfig(every_steps=1)
        said = {"column_bounds": state.column_bounds, "buffers": state.buffers}
        saver = Saver(folder, keep=1, background=background, rank=self._rank)
        with Checkpoints(
            saver, config, state, describe=lambda _: run_state(1, **said), rank=self._rank
        ) as saved:
            saved.after_step(1, is_complete=False, progress=lambda: Progress(step=1))
        assert saver.failure is None

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        (load_weights if weights_only else load_model)(newest(folder), self._state)


def newest(folder: Path) -> Manifest:
    manifest = read_manifest(checkpoints(folder)[0])
    check_parts(manifest)
    return manifest


def caches_of(rank: Rank, is_cached: bool) -> Any:
    """Return the block in which lookups have caches; a GPU's own are in the plan."""
    if is_cached and rank.device.type == "cpu":
        return cached_lookups()
    return contextlib.nullcontext(list[RowCache]())


def trained(rank: Rank, is_cached: bool, kind: str, folder: str, background: bool) -> list[Any]:
    """Figures and checkpoints of a training that evaluates, measures and saves on its way.

    Return those of every rank, and the number of rows that were evicted from caches.
    """
    path = Path(folder)
    with caches_of(rank, is_cached) as caches:
        model = Trained(rank, kind, is_cached=is_cached)
        figures = model.train(0, 2)
        model.save(path / "early", background=background)
        figures.append(model.evaluate())
        model.measure()
        figures += model.train(2, 5)
        model.save(path / "late", background=background)
        figures += model.train(5, 6)
    return gathered(rank, (figures, sum(cache.num_evicted for cache in caches)))


def resumed(rank: Rank, kind: str, folder: str, later: bool) -> list[Any]:
    """Figures of a training with caches that goes on from the early checkpoint, as a run does.

    Args:
        later: whether the model has trained on other weights before, which are in its caches.
    """
    with caches_of(rank, True):
        model = Trained(rank, kind, is_cached=True)
        model.measure()  # brings the first weights into the caches
        if later:
            model.train(0, 3)
        model.load(Path(folder) / "early")
        figures = [model.evaluate(), *model.train(2, 5)]
        model.save(Path(folder) / "resumed")
        figures += model.train(5, 6)
    return gathered(rank, figures)


def begun(rank: Rank, kind: str, folder: str) -> list[float]:
    """Evaluations of a new model with the weights of the late checkpoint: cached, and not."""
    found = []
    for is_cached in (True, False):
        with caches_of(rank, is_cached):
            model = Trained(rank, kind, is_cached=is_cached)
            model.measure()
            model.load(Path(folder) / "late", weights_only=True)
            found.append(model.evaluate())
    return found


def check_equal(before: Manifest, after: Manifest, *, tolerance: float = 0.0) -> None:
    assert before.tensors.keys() == after.tensors.keys()
    for name in before.tensors:
        if name.startswith(RANK_PREFIX):
            continue
        torch.testing.assert_close(
            load_whole(before, name),
            load_whole(after, name),
            rtol=tolerance,
            atol=tolerance,
            msg=name,
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A training without caches, and its figures."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_ranks(trained, 2, False, "rows_and_columns", str(folder), True)


@pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])
def test_checkpoints_have_the_newest_rows(background, runs, tmp_path):
    folder, expected = runs
    found = run_ranks(trained, 2, True, "rows_and_columns", str(tmp_path), background)
    assert [figures for figures, _ in found] == [figures for figures, _ in expected]
    assert all(num_evicted > 10 for _, num_evicted in found), "the caches are too large for a test"
    for name in ("early", "late"):
        check_equal(newest(folder / name), newest(tmp_path / name))


@pytest.mark.parametrize("later", [False, True], ids=["measured", "trained"])
def test_a_resumed_run_trains_on_what_it_has_loaded(later, runs):
    folder, expected = runs
    found = run_ranks(resumed, 2, "rows_and_columns", str(folder), later)
    assert found == [figures[2:] for figures, _ in expected]
    check_equal(newest(folder / "late"), newest(folder / "resumed"))


@pytest.mark.parametrize(("kind", "num_ranks"), [("table_wise", 1), ("row_wise", 3)])
def test_another_plan_begins_with_the_loaded_rows(kind, num_ranks, runs):
    folder, _ = runs
    cached, uncached = run_ranks(begun, num_ranks, kind, str(folder))
    assert cached == uncached


def test_an_export_has_the_newest_rows(runs, tmp_path):
    folder, _ = runs
    run_ranks(trained, 2, True, "rows_and_columns", str(tmp_path), True)
    cached, uncached = (
        exported(path / "late", tmp_path / f"of-{path.name}") for path in (tmp_path, folder)
    )
    assert cached.keys() == uncached.keys()
    assert all(torch.equal(cached[name], uncached[name]) for name in cached)


def exported(folder: Path, out: Path) -> dict[str, Tensor]:
    export(newest(folder), out)
    files = sorted(out.glob("*.safetensors"))
    assert files[0].name == DENSE_FILE
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
