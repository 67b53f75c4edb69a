"""The edits by which docs/guide/extending.md adds a measured stage are all that it takes."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests import preloaded
from tests.preloaded import ROOT

pytestmark = pytest.mark.slow

DIFF_BLOCK = re.compile(r'^```diff title="([^"]+)"\n(.*?)^```$', re.M | re.S)
TIME_MS = 25.0
CHANGES = {
    # the page's stage takes so long, measured and predicted
    "dlrm_sharded/measuring/measure.py": (
        "output.detach().clone()",
        f"time.sleep({TIME_MS / 1000})",
    ),
    "dlrm_sharded/cost/base.py": ('"fwd_copy": [0.0]', f'"fwd_copy": [{TIME_MS}]'),
}
"""Text that is replaced in the copy, by file."""

SMALL_RUN = ["batch_size=64", "data.max_rows=100", "trainer.num_steps=2", "measure.iterations=3"]


def apply(diff: str, path: Path) -> None:
    """Replace the lines of a diff that stay or go, which stand in the file once, by its result."""
    lines = [(line[:1], line[1:]) for line in diff.splitlines(keepends=True)]
    before = "".join(line for sign, line in lines if sign != "+")
    after = "".join(line for sign, line in lines if sign != "-")
    text = path.read_text()
    assert text.count(before) == 1, f"{path.name} has these lines {text.count(before)} times"
    path.write_text(text.replace(before, after))


def test_a_stage_takes_the_edits_of_the_page(tmp_path):
    for folder in ("dlrm_sharded", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    diffs = DIFF_BLOCK.findall((ROOT / "docs" / "guide" / "extending.md").read_text())
    for name, diff in diffs:
        apply(diff, tmp_path / name)
    for name, (before, after) in CHANGES.items():
        text = (tmp_path / name).read_text()
        assert text.count(before) == 1
        (tmp_path / name).write_text(text.replace(before, after))
    path = os.pathsep.join([str(tmp_path), str(ROOT / "launch")])
    variables = {"PYTHONPATH": path, "DLRM_SHARDED_CACHE": str(tmp_path / "cache")}
    command = ["-m", "dlrm_sharded.train", *SMALL_RUN, "hydra.run.dir=run"]

    done = preloaded.run(*command, cwd=tmp_path, env=os.environ | variables, exit_code=0)

    assert len(diffs) == 6
    assert "fwd_copy" in done.output
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert result["stages_ms"]["fwd_copy"] >= TIME_MS
    times_ms = result["stages_ms"].values()
    assert result["critical_path_ms"] == pytest.approx(sum(times_ms), rel=1e-9)
    assert result["embedding_cost_ms"] == pytest.approx(sum(times_ms), rel=1e-9), "one rank"
    assert plan["predicted"]["per_rank"][0]["fwd_copy_ms"] == TIME_MS
    assert result["predicted_critical_path_ms"] >= TIME_MS
