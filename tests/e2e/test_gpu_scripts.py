"""scripts/first_gpu.py and scripts/benchmark.py, rehearsed on the CPU with small sizes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import preloaded
from tests.e2e.runs import ROOT, environment

pytestmark = pytest.mark.slow


def rehearsed(folder: Path, *words: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Rehearse all parts; return the cases of each part, all of which have to succeed.

    Processes have interpreters of their own, as the script looks for ranks by their environments.
    """
    script = str(ROOT / "scripts" / "first_gpu.py")
    arguments = [script, "--out", str(folder), "--small", *words]
    with preloaded.start(*arguments, env=environment(), own_process=True) as process:
        output, _ = process.communicate(timeout=3000)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for line in map(json.loads, (folder / "results.jsonl").read_text().splitlines()):
        assert "error" not in line, line
        found.setdefault(line["part"], {})[line["case"]] = line
    assert process.returncode == 0, output
    assert output.splitlines()[-1] == f"send {folder}.tar.gz"
    assert all(cases["end"]["status"] == "ok" for cases in found.values())
    return found


def test_all_parts_of_a_gpu(tmp_path: Path) -> None:
    found = rehearsed(tmp_path)
    assert [*found] == ["environment", "tests", "mlperf_share", "mlperf_whole"]
    outcomes = found["tests"]["tests"]["outcomes"]
    assert len(outcomes) >= 3
    assert {*outcomes.values()} == {"PASSED"}
    for part, cases in (
        ("share", ["base", "sparse_dist", "base_graph"]),
        ("whole", ["old_default"]),
    ):
        measured = found[f"mlperf_{part}"]
        assert all(measured[case]["step_ms"] > 0 for case in (*cases, "default"))
        assert measured["default over the fastest other"]["fastest"] in cases
        assert all(measured[case]["result"]["world_size"] == 1 for case in cases)


def test_all_parts_of_several_gpus(tmp_path: Path) -> None:
    found = rehearsed(tmp_path, "--ranks", "2")
    names = ["environment", "pipelines", "exchanges", "killed", "stopped", "sharders"]
    assert [*found] == names
    pipelines = found["pipelines"]
    losses = {name: line["result"]["loss"] for name, line in pipelines.items() if "result" in line}
    assert losses.keys() >= {"base", "sparse_dist", "base_graph", "default", "default_not_bound"}
    assert [*losses.values()] == pytest.approx([losses["base"]] * len(losses), rel=1e-4)
    assert "rank 1 was killed" in found["killed"]["rank 1"]["line"]
    assert "waited for: rank 1" in found["stopped"]["rank 1"]["line"]
    assert len([line for line in found["sharders"].values() if "result" in line]) == 5
    assert -1 <= found["sharders"]["rank correlation"]["value"] <= 1


@pytest.mark.parametrize("part", ["plain", "host"])
def test_training_beside_torchrec(part: str) -> None:
    sizes = ["--ranks", "1", "--batch-size", "64", "--steps", "2", "--rounds", "1"]
    script = str(ROOT / "scripts" / "benchmark.py")
    done = preloaded.run(script, part, *sizes, env=environment(), exit_code=0)
    assert "1 ranks on cpu, batch 64; 1 rounds of 2 steps" in done.stdout
    assert "| TorchRec | " in done.stdout
    assert "| dlrm_sharded | " in done.stdout
