"""An artifact on disk: whole, of the right kind, and found where it is looked for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from dlrm_sharded.files.errors import DataError
from dlrm_sharded.hardware.artifact import HEADER, read_artifact, write_artifact
from dlrm_sharded.hardware.artifact_kinds import Kind, cost_model_kind, policy_kind
from tests.unit.damage import change_a_byte, cut_off

KIND = cost_model_kind("learned")
POLICY = policy_kind("dreamshard")
FEATURES = {"work": ["ids", "bags"], "profile": ("log_rows",)}
ARRAYS = {
    "net.weight_0": np.arange(6.0).reshape(2, 3),
    "transposed": np.arange(6.0).reshape(2, 3).T,
    "single": np.array(0.25),
    "small": np.array([1, 2], dtype=np.float32),
}


def meta(**changes: Any) -> dict[str, Any]:
    return {
        "kind": KIND.name,
        "hardware": "cpu: test",
        "device": "cpu",
        "cores": 2,
        "optimizer": "sgd",
        "features": FEATURES,
        "ranges": {"ranks": [1, 4]},
        "measured_links": ["intra"],
        **changes,
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_artifact(tmp_path / "deep" / "er", "learned-cpu_test", ARRAYS, meta())


def test_reads_what_was_written(path: Path) -> None:
    found = read_artifact(path, kind=KIND, features=FEATURES)
    assert found.path == path
    assert found.meta["ranges"] == {"ranks": [1, 4]}
    assert found.meta["hardware"] == "cpu: test"
    assert found.arrays.keys() == ARRAYS.keys()
    for key, array in ARRAYS.items():
        assert found.arrays[key].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[key], array)
    assert [file.name for file in path.parent.iterdir()] == ["learned-cpu_test.safetensors"]


def test_anyone_can_read_it_without_running_our_code(path: Path) -> None:
    """No pickle: the arrays need safetensors alone, and its header has the rest as JSON."""
    np.testing.assert_array_equal(load_file(path)["transposed"], ARRAYS["transposed"])
    assert header(path)["features"] == json.loads(json.dumps(FEATURES))


def header(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="numpy") as file:
        fields: dict[str, Any] = json.loads(file.metadata()[HEADER])
    return fields


def with_header(text: str) -> Callable[[Path], None]:
    return lambda path: save_file(load_file(path), path, metadata={HEADER: text})


def written_with(**changes: Any) -> Callable[[Path], None]:
    """The artifact as its writer would have written it with other fields; None leaves one out."""

    def change(path: Path) -> None:
        fields = {key: value for key, value in (meta() | changes).items() if value is not None}
        write_artifact(path.parent, path.stem, load_file(path), fields)

    return change


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no_file": (lambda path: path.unlink(), "cannot read the NOUN .*No such file"),
    "truncated": (cut_off, "is damaged"),
    "changed_byte": (change_a_byte, "was changed since"),
    "no_checksum": (
        with_header(json.dumps({"format": 2, "kind": "NAME"})),
        "was changed since|is not a NOUN",
    ),
    "header_is_no_json": (with_header("{"), "is damaged"),
    "other_kind": (written_with(kind="other"), "is not a NOUN of the kind 'NAME'"),
    "other_format": (written_with(format=99), "format 2"),
}


@pytest.mark.parametrize("kind", [KIND, POLICY], ids=["cost_model", "policy"])
@pytest.mark.parametrize(("damage", "what"), DAMAGE.values(), ids=DAMAGE)
def test_says_what_is_wrong_and_what_to_do(
    path: Path, damage: Callable[[Path], Any], what: str, kind: Kind
) -> None:
    written_with(kind=kind.name)(path)
    damage(path)
    what = what.replace("NOUN", kind.noun).replace("NAME", kind.name)
    with pytest.raises(DataError, match=what) as error:
        read_artifact(path, kind=kind, features=FEATURES)
    assert str(path) in str(error.value)
    assert f"with {kind.made_with}" in str(error.value)


def test_refuses_what_was_fitted_to_other_features(path: Path) -> None:
    written_with(features={"work": ["bags", "ids"], "profile": ["log_rows"]})(path)
    with pytest.raises(DataError, match="fitted to other features"):
        read_artifact(path, kind=KIND, features=FEATURES)


def test_refuses_numbers_that_are_not_finite(path: Path) -> None:
    write_artifact(path.parent, path.stem, ARRAYS | {"single": np.array(np.nan)}, meta())
    with pytest.raises(DataError, match="not finite"):
        read_artifact(path, kind=KIND, features=FEATURES)
