import pytest

from dlrm_sharded.files.provenance import fbgemm_version, versions


@pytest.mark.parametrize(
    ("gpu", "cpu", "expected"),
    [
        (None, None, None),
        ("1.9.0", None, "1.9.0"),
        (None, "1.8.0", "1.8.0"),
        ("1.8.0+cpu", "1.9.0", "1.9.0"),
        ("1.9.0", "1.8.0", "1.9.0"),
    ],
)
def test_the_package_that_looks_up_rows(gpu, cpu, expected):
    """The package for GPUs may be installed over the one for CPUs, or stand for it."""
    found = {"fbgemm-gpu": gpu, "fbgemm-gpu-cpu": cpu}
    assert fbgemm_version({name: of for name, of in found.items() if of}) == expected


@pytest.mark.parametrize("metadata", [b"Name: torch\xff", b"Name: torch\n", b"Version:\n"])
def test_versions_that_cannot_be_read_are_left_out(metadata, tmp_path, monkeypatch):
    folder = tmp_path / "torch-2.13.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_bytes(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    assert "torch" not in versions()
    assert "torchrec" in versions()
