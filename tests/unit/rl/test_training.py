"""The schedule: resumed after a kill as if there had been none, and decided by its seed alone."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlrm_sharded import DataError, PlanCost, ShardingTask
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.rl.learned_policy import METHODS, to_arrays
from dlrm_sharded.rl.training import MeasurePlan, PolicyTraining, RoundResult, RoundSchedule
from tests.unit.rl.cases import predicted, short_method, small_pool
from tests.unit.synthetic import assert_same_arrays

each_kind = pytest.mark.parametrize("kind", METHODS)


class KilledError(Exception):
    """In place of a kill."""


def short_training(
    kind: str, *, seed: int = 5, measure: MeasurePlan = predicted, **keys: Any
) -> PolicyTraining:
    training = untrained(kind, seed)
    training.run(measure, **keys)
    return training


def untrained(kind: str, seed: int = 5) -> PolicyTraining:
    schedule = RoundSchedule(num_rounds=3, plans_per_round=3, seed=seed)
    return PolicyTraining(short_method(kind), small_pool(), schedule)


def kill_after(number: int) -> Callable[[RoundResult], None]:
    def on_round(finished: RoundResult) -> None:
        if finished.number == number:
            raise KilledError

    return on_round


def assert_same_networks(first: PolicyTraining, second: PolicyTraining) -> None:
    assert_same_arrays(to_arrays(first.net), to_arrays(second.net))


@each_kind
@pytest.mark.parametrize("number", [0, 2], ids=["first-round", "last-round"])
def test_goes_on_after_a_kill(kind: str, number: int, tmp_path: Path) -> None:
    checkpoint, settings = tmp_path / "made" / "policy.partial", {"a": 1}
    whole, played = short_training(kind), []
    keys: dict[str, Any] = {"checkpoint": checkpoint, "settings": settings}
    with pytest.raises(KilledError):
        short_training(kind, on_round=kill_after(number), **keys)
    resumed = short_training(kind, on_round=lambda done: played.append(done.number), **keys)
    assert played == list(range(number + 1, 3))
    assert_same_networks(whole, resumed)
    for first, second in zip(whole.rounds, resumed.rounds, strict=True):
        assert dataclasses.replace(first, seconds=second.seconds) == second
    assert [path.name for path in checkpoint.parent.iterdir()] == ["policy.partial"]


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    short_training("dreamshard", checkpoint=tmp_path / "p", settings={"seed": 1, "same": [2]})
    before = (tmp_path / "p").read_bytes()
    with pytest.raises(DataError, match=r"other settings \(seed: 1, now 2\)"):
        short_training("dreamshard", checkpoint=tmp_path / "p", settings={"seed": 2, "same": [2]})
    assert (tmp_path / "p").read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[: len(data) // 2], lambda _: b"", lambda _: b"not a checkpoint"],
    ids=["half", "empty", "text"],
)
def test_a_damaged_checkpoint_is_refused(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    checkpoint = tmp_path / "p"
    short_training("dreamshard", checkpoint=checkpoint)
    checkpoint.write_bytes(damage(checkpoint.read_bytes()))
    message = r"is damaged or is not the checkpoint of a training.*; remove it to train from the"
    with pytest.raises(DataError, match=message):
        short_training("dreamshard", checkpoint=checkpoint)


@each_kind
def test_the_seed_decides(kind: str) -> None:
    before = torch.get_rng_state()
    first = short_training(kind)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert_same_networks(first, short_training(kind))
    arrays, others = to_arrays(first.net), to_arrays(short_training(kind, seed=6).net)
    assert all((arrays[key] != others[key]).any() for key in arrays if key.endswith("0.weight"))
    assert [result.number for result in first.rounds] == [0, 1, 2]


@each_kind
def test_every_part_learns(kind: str) -> None:
    arrays = to_arrays(untrained(kind).net)
    for key, array in to_arrays(short_training(kind).net).items():
        assert np.isfinite(array).all(), key
        assert (array != arrays[key]).any(), f"{key} is as it began"


def test_plans_are_measured_as_the_policy_makes_them() -> None:
    measured: list[tuple[ShardingTask, tuple[int, ...]]] = []

    def measure(task: ShardingTask, ranks: Sequence[int]) -> PlanCost:
        measured.append((task, tuple(ranks)))
        return predicted(task, ranks)

    rounds = short_training("dreamshard", measure=measure).rounds
    assert len({task for task, _ in measured}) == 9
    for task, ranks in measured:
        used = ShardingPlan.from_ranks(task, ranks).bytes_by_rank(task.topology)
        assert max(used) <= task.topology.memory_bytes
    for number, finished in enumerate(rounds):
        costs = [predicted(*plan).cost_ms for plan in measured[3 * number : 3 * number + 3]]
        assert finished.measured_ms == pytest.approx(np.mean(costs))


def test_learning_rates_fall_to_nothing_over_all_rounds() -> None:
    schedule = RoundSchedule(num_rounds=2, plans_per_round=1, seed=0)
    rates = [rate for number in (0, 1) for rate in schedule.learning_rates(0.8, number, 2)]
    assert rates == pytest.approx([0.8, 0.6, 0.4, 0.2])
