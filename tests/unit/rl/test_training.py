"""The schedule: resumed after a kill as if there had been none, and decided by its seed alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlrm_sharded import DataError, PlanCost, ShardingTask
from dlrm_sharded.plans.plan import whole_tables
from dlrm_sharded.rl.policy import METHODS, to_arrays
from dlrm_sharded.rl.training import (
    RoundResult,
    RoundSchedule,
    TrainingMethod,
    build_method,
    train_policy,
)
from tests.unit.made_up import assert_same_arrays
from tests.unit.rl.cases import SHORT, predicted, small_pool

each_kind = pytest.mark.parametrize("kind", METHODS)
SCHEDULE = RoundSchedule(num_rounds=3, plans_per_round=3, seed=5)


class KilledError(Exception):
    """In place of a kill."""


def short_training(
    kind: str, *, schedule: RoundSchedule = SCHEDULE, **keys: Any
) -> tuple[TrainingMethod, list[RoundResult]]:
    method = build_method(SHORT[kind], seed=schedule.seed)
    return method, train_policy(method, small_pool(), predicted, schedule, **keys)


def kill_after(number: int) -> Callable[[RoundResult], None]:
    def on_round(finished: RoundResult) -> None:
        if finished.number == number:
            raise KilledError

    return on_round


def assert_same_networks(first: TrainingMethod, second: TrainingMethod) -> None:
    assert_same_arrays(to_arrays(first.net), to_arrays(second.net))


@each_kind
@pytest.mark.parametrize("number", [0, 1])
def test_goes_on_after_a_kill(kind: str, number: int, tmp_path: Path) -> None:
    whole, whole_rounds = short_training(kind, settings={"a": 1})
    checkpoint = tmp_path / "made" / "policy.partial"
    with pytest.raises(KilledError):
        short_training(kind, checkpoint=checkpoint, settings={"a": 1}, on_round=kill_after(number))
    played: list[int] = []
    resumed, resumed_rounds = short_training(
        kind,
        checkpoint=checkpoint,
        settings={"a": 1},
        on_round=lambda finished: played.append(finished.number),
    )
    assert played == list(range(number + 1, 3))
    assert_same_networks(whole, resumed)
    for first, second in zip(whole_rounds, resumed_rounds, strict=True):
        for key in ("number", "measured_ms", "cost_error_percent", "estimated_ms", "entropy"):
            assert getattr(first, key) == getattr(second, key)
    assert [path.name for path in checkpoint.parent.iterdir()] == ["policy.partial"]


@each_kind
def test_a_finished_checkpoint_is_not_trained_again(kind: str, tmp_path: Path) -> None:
    first, rounds = short_training(kind, checkpoint=tmp_path / "p")
    again, rounds_again = short_training(kind, checkpoint=tmp_path / "p", on_round=kill_after(2))
    assert_same_networks(first, again)
    assert rounds_again == rounds


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    short_training("dreamshard", checkpoint=tmp_path / "p", settings={"seed": 1, "same": [2]})
    before = (tmp_path / "p").read_bytes()
    with pytest.raises(DataError, match=r"other settings \(seed: 1, now 2\)"):
        short_training("dreamshard", checkpoint=tmp_path / "p", settings={"seed": 2, "same": [2]})
    assert (tmp_path / "p").read_bytes() == before


def torn(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    "damage",
    [torn, lambda data: data[:100], lambda _: b"", lambda _: b"not a checkpoint"],
    ids=["half", "beginning", "empty", "text"],
)
def test_a_damaged_checkpoint_is_refused(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    checkpoint = tmp_path / "p"
    short_training("dreamshard", checkpoint=checkpoint)
    checkpoint.write_bytes(damage(checkpoint.read_bytes()))
    message = "is damaged or is not the checkpoint of a training"
    with pytest.raises(DataError, match=message) as raised:
        short_training("dreamshard", checkpoint=checkpoint)
    assert str(raised.value).endswith("; remove it to train from the start")
    assert "\n" not in str(raised.value)


@each_kind
def test_the_seed_decides(kind: str) -> None:
    before = torch.get_rng_state()
    first, rounds = short_training(kind)
    torch.rand(3)
    second, _ = short_training(kind)
    other, _ = short_training(kind, schedule=RoundSchedule(num_rounds=3, plans_per_round=3, seed=6))
    assert_same_networks(first, second)
    arrays, others = to_arrays(first.net), to_arrays(other.net)
    assert all((arrays[key] != others[key]).any() for key in arrays if key.endswith("0.weight"))
    assert [result.number for result in rounds] == [0, 1, 2]
    torch.set_rng_state(before)
    short_training(kind)
    assert torch.equal(torch.get_rng_state(), before)


@each_kind
def test_every_part_learns(kind: str) -> None:
    start = build_method(SHORT[kind], seed=SCHEDULE.seed)
    finished, _ = short_training(kind)
    arrays = to_arrays(start.net)
    for key, array in to_arrays(finished.net).items():
        assert np.isfinite(array).all(), key
        assert (array != arrays[key]).any(), f"{key} is as it began"


def test_plans_are_measured_as_the_policy_makes_them() -> None:
    measured: list[tuple[ShardingTask, tuple[int, ...]]] = []

    def measure(task: ShardingTask, ranks: list[int]) -> PlanCost:
        measured.append((task, tuple(ranks)))
        return predicted(task, ranks)

    method = build_method(SHORT["dreamshard"], seed=0)
    rounds = train_policy(method, small_pool(), measure, SCHEDULE)  # type: ignore[arg-type]
    assert len(measured) == 9
    for task, ranks in measured:
        assert max(whole_tables(task, ranks).bytes_by_rank(task.topology)) <= (
            task.topology.memory_bytes
        )
    for number, finished in enumerate(rounds):
        costs = [predicted(*plan).cost_ms for plan in measured[3 * number : 3 * number + 3]]
        assert finished.measured_ms == pytest.approx(np.mean(costs))
    assert len({task for task, _ in measured}) == 9
