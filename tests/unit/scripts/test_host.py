"""The study of the host: which operators count, where, and what is left at size zero."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import host
from benchmarks.host_operators import count_operators, is_operator, profiled_operators


@dataclass
class Event:
    """An event of a profiler, in the order of its ancestors."""

    name: str
    start: float
    end: float
    cpu_children: list[Event] = field(default_factory=list)
    cpu_parent: Event | None = None

    def __post_init__(self) -> None:
        self.time_range = SimpleNamespace(start=self.start, end=self.end)
        for child in self.cpu_children:
            child.cpu_parent = self

    def all(self) -> list[Event]:
        return [self, *(event for child in self.cpu_children for event in child.all())]


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("aten::mm", True),
        ("aten::copy_", True),
        ("aten::add_", True),
        ("fbgemm::asynchronous_complete_cumsum", True),
        ("aten::view", False),
        ("aten::t", False),
        ("aten::to", False),
        ("aten::empty_strided", False),
        ("aten::detach_", False),
        ("## forward 3 ##", False),
        ("autograd::engine::evaluate_function: AddmmBackward0", False),
        ("Optimizer.step#DenseAdagrad.step", False),
    ],
)
def test_operators_compute_or_move_numbers(name, counts):
    import fbgemm_gpu  # noqa: F401  its operators are known once it is imported

    assert is_operator(name) is counts


def test_leaves_are_counted_by_the_innermost_region():
    """Those of another thread belong to the region of their time."""
    cast = Event("aten::to", 2, 4, [Event("aten::_to_copy", 2, 4, [Event("aten::copy_", 3, 4)])])
    lookup = Event("## lookup ##", 4.5, 6, [Event("aten::mm", 5, 6)])
    forward = Event("## forward 12 ##", 1, 8, [cast, lookup, Event("aten::mm", 7, 8)])
    graph = Event("CompiledFunctionBackward", 10, 12, [Event("aten::mm", 11, 12)])
    backward = Event("## backward 12 ##", 9, 13)
    events = [*graph.all(), *forward.all(), backward, Event("aten::add_", 14, 15)]
    assert count_operators(events) == {
        "forward": {"eager": 2, "copies": 1},
        "lookup": {"eager": 1, "copies": 0},
        "backward": {"compiled": 1},
        "between": {"eager": 1, "copies": 0},
    }


def test_counts_are_those_of_one_step():
    weight = torch.zeros(3, 3)

    def step() -> None:
        with torch.profiler.record_function("## forward 0 ##"):
            (weight @ weight).to(torch.float64)

    assert profiled_operators(step) == {"forward": {"eager": 2, "copies": 1}}


def test_report_is_at_size_zero():
    """A step of 2 ms, or of 1 ms, and 10 us a sample; the second process has 3 ms of others."""
    rows = [
        {
            "ranks": 2,
            "device": "cpu",
            "loop": loop,
            "batch_size": size,
            "steps": 7,
            "main_ms": [ms + 0.01 * size, ms + 0.02 * size],
            "process_ms": [ms + 3 + 0.01 * size] * 2,
        }
        for loop, ms in (("torchrec", 2.0), ("dlrm_sharded", 1.0))
        for size in (10, 20, 40)
    ]
    np.testing.assert_allclose(host.at_size_zero(rows[:3], "main_ms"), [2.0, 2.0])
    operators = {"forward": {"eager": 3.0, "copies": 1.0}}
    compiled = {"backward": {"eager": 1.0, "copies": 0.0, "compiled": 4.0}}
    rows += [
        {"ranks": 2, "loop": "torchrec", "operators": operators},
        {"ranks": 2, "loop": "dlrm_sharded", "operators": operators | compiled},
    ]
    lines = host.report(rows, None).splitlines()
    assert "2 interleaved rounds of 7 steps" in lines[0]
    assert "proxy" in lines[0]
    assert "| 2 | torchrec | 2.15 | 2.00 | 5.00 | 1.000 | 1.000 to 1.000 |" in lines
    assert "| 2 | dlrm_sharded | 1.15 | 1.00 | 4.00 | 0.500 | 0.500 to 0.500 |" in lines
    assert "| forward | 3 (1) | 3 (1) |" in lines
    assert "| backward | 0 (0) | 1 (0; 4) |" in lines
    assert "| all | 3 (1) | 4 (1; 4) |" in lines
