"""The notebook of the guide runs, and it holds no outputs.

Its cells are executed in one namespace of this process, in order, as Jupyter's packages are not
among those of the tests. So what is not tested is how a notebook displays values.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide"


def cells(kind: str) -> list[dict[str, Any]]:
    notebook = json.loads((GUIDE / "notebook.ipynb").read_text())
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["language"]) == (4, "python")
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def code() -> list[str]:
    return ["".join(cell["source"]) for cell in cells("code")]


def test_it_holds_no_outputs() -> None:
    assert all(cell["outputs"] == [] and not cell["execution_count"] for cell in cells("code"))


def test_it_runs_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mpl.use("agg")
    names: dict[str, Any] = {}

    for cell in code():
        exec(cell, names)

    reports = names["reports"]
    assert reports["search"].cost.cost_ms <= reports["size"].cost.cost_ms
    assert names["report"].gap >= 0
    assert len(names["cost"].to_frame()) == 4
    names["plt"].close("all")
