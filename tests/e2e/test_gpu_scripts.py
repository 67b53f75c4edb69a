"""scripts/first_gpu.py and scripts/benchmark.py, rehearsed on the CPU with small sizes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import preloaded
from tests.e2e.runs import ROOT, environment

pytestmark = pytest.mark.slow


def test_all_parts_of_a_gpu(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path), "--small"]
    script = str(ROOT / "scripts" / "first_gpu.py")
    preloaded.run(script, *words, env=environment(), timeout=1200, exit_code=0)
    found: dict[str, list[dict[str, Any]]] = {}
    for line in map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines()):
        found.setdefault(line["part"], []).append(line)
    for *cases, end in found.values():
        assert end["status"] == "ok", end
        assert not [case for case in cases if "error" in case]
    environment_cases = {case["case"]: case for case in found["environment"][:-1]}
    assert environment_cases["probe"]["gather_gb_per_s"] > 0
    kernels = found["kernels"][:-1]
    assert len(kernels) == 9
    assert all(0 < case["lookup_error"] < 1e-6 for case in kernels)
    assert all(0 < case["weight_error"] < 1e-5 for case in kernels)
    assert all(case["skipped"] is False for case in found["tests"][:-1])
    names = [case["case"] for case in found["mlperf"][:-1]]
    assert names[:2] == ["32 sparse_dist", "32 base"]
    assert all(case["main_thread_ms"] > 0 for case in found["mlperf"][:-1])
    assert len(list((tmp_path / "traces").glob("*.json.gz"))) == len(names)
    assert [case["result"]["world_size"] for case in found["run"][:-1]] == [1, 1]
    *_, plans, _ = found["ranks"]
    for figures in (value for value in plans.values() if isinstance(value, dict)):
        assert len(figures["by_rank_ms"]) == len(figures["predicted_by_rank_ms"]) == 8


@pytest.mark.parametrize("part", ["plain", "host"])
def test_training_beside_torchrec(part: str) -> None:
    sizes = ["--ranks", "1", "--batch-size", "64", "--steps", "2", "--rounds", "1"]
    script = str(ROOT / "scripts" / "benchmark.py")
    done = preloaded.run(script, part, *sizes, env=environment(), exit_code=0)
    assert "1 ranks on cpu, batch 64; 1 rounds of 2 steps" in done.stdout
    assert "| TorchRec | " in done.stdout
    assert "| dlrm_sharded | " in done.stdout
