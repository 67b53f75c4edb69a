"""The edits by which docs/extending.md adds a measured stage are all that it takes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIFF_BLOCK = re.compile(r'^```diff title="([^"]+)"\n(.*?)^```$', re.M | re.S)
SMALL_RUN = ["batch_size=64", "data.max_rows=100", "trainer.num_steps=2", "measure.iterations=3"]


def apply(diff: str, path: Path) -> None:
    """Replace the lines of a diff that stay or go, which stand in the file once, by its result."""
    lines = [(line[:1], line[1:]) for line in diff.splitlines(keepends=True)]
    before = "".join(line for sign, line in lines if sign != "+")
    after = "".join(line for sign, line in lines if sign != "-")
    text = path.read_text()
    assert text.count(before) == 1, f"{path.name} has these lines {text.count(before)} times"
    path.write_text(text.replace(before, after))


def test_a_stage_takes_the_edits_of_the_page(tmp_path: Path) -> None:
    for folder in ("dlrm_sharded", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    diffs = DIFF_BLOCK.findall((ROOT / "docs" / "extending.md").read_text())
    for name, diff in diffs:
        apply(diff, tmp_path / name)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "launch")])
    command = [sys.executable, "-m", "dlrm_sharded.train", *SMALL_RUN, "hydra.run.dir=run"]

    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr
    assert len(diffs) == 4
    assert "fwd_copy" in done.stdout + done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert result["stages_ms"]["fwd_copy"] > 0
    times_ms = result["stages_ms"].values()
    assert result["critical_path_ms"] == pytest.approx(sum(times_ms), rel=1e-9)
    assert result["embedding_cost_ms"] == pytest.approx(sum(times_ms), rel=1e-9), "one rank"
    assert plan["predicted"]["per_rank"][0]["fwd_copy_ms"] == 0.0
