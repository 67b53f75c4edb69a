import pytest

from dlrm_sharded.files.provenance import fbgemm_version


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
