"""scripts/first_gpu.py: its cases, what it keeps of them, and its limits."""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

import first_gpu
from first_gpu import MlperfCase, Part


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / first_gpu.RESULTS).read_text().splitlines()]


def test_cases_that_compile_come_last() -> None:
    cases = first_gpu.mlperf_cases((8, 64), compiles=True, on_cuda=True)
    compiled = [case.compile_mode is not None for case in cases]
    assert compiled == sorted(compiled)
    assert len({case.name for case in cases}) == len(cases) == 23
    assert cases[0] == MlperfCase(8, "sparse_dist")
    assert MlperfCase(8, "base", "auto", dense_graph=True) in cases
    assert not [c for c in cases if c.dense_graph and c.compile_mode == "reduce-overhead"]


def test_a_cpu_has_no_pipelines_that_need_streams() -> None:
    cases = first_gpu.mlperf_cases((8,), compiles=False, on_cuda=False)
    assert {case.pipeline for case in cases} == {"base", "sparse_dist", "sparse_dist_lite"}
    assert {case.compile_mode for case in cases} == {None}


def test_overlapping_work_of_a_gpu_counts_once() -> None:
    events: list[dict[str, Any]] = [
        {"cat": "kernel", "ts": 1000.0, "dur": 2000.0},
        {"cat": "gpu_memcpy", "ts": 2000.0, "dur": 2000.0},
        {"cat": "cpu_op", "ts": 0.0, "dur": 9000.0},
        {"cat": "kernel", "ts": 6000.0, "dur": 500.0},
        {"ph": "M"},
    ]
    assert first_gpu.busy_ms(events) == pytest.approx(3.5)
    assert first_gpu.busy_ms([]) == 0.0


def test_a_failed_case_does_not_end_the_others(tmp_path: Path) -> None:
    part = Part("kernels", tmp_path, small=True, ends_at=time.monotonic() + 60)

    def fails() -> dict[str, Any]:
        raise ValueError("too hot")

    part.run_cases({"a": fails, "b": lambda: {"ms": 2.0}}, seconds=1)
    part.run_cases({"c": lambda: {"ms": 3.0}}, seconds=math.inf)
    a, b, c = results(tmp_path)
    assert a["error"] == "ValueError: too hot"
    assert (b["part"], b["case"], b["ms"], "error" in b) == ("kernels", "b", 2.0, False)
    assert c["error"].startswith("no time: ")
    assert part.errors == [a["error"], c["error"]]


def test_a_part_that_hangs_is_ended(tmp_path: Path) -> None:
    """After so short a time it still loads the libraries."""
    options = argparse.Namespace(out=tmp_path, small=True)
    end = first_gpu.run_part("kernels", options, limit_s=0.2)
    assert end["status"] == "out of time"
    assert end["seconds"] < 60
    assert (tmp_path / "kernels.log").exists()
