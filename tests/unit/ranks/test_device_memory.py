"""The memory of this host, with the limits of control groups."""

import os
from pathlib import Path

import pytest

from dlrm_sharded.ranks.device_memory import available_host_bytes, free_in_groups

GROUP = {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 1\ninactive_file 200"}


def make_group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ("0::/job/step", "job/step"),
        ("0::/job/step", "job"),
        ("0::/not/shown", ""),
        ("5:cpu:/a\n0::/job\n", "job"),
    ],
    ids=["own", "above", "container", "beside_version_1"],
)
def test_a_control_group_limits_the_memory(text, folder, tmp_path):
    """Page cache that the kernel frees on demand does not count as used."""
    make_group(tmp_path / folder, GROUP)
    assert free_in_groups(text, tmp_path) == [500]


def test_a_control_group_without_a_limit(tmp_path):
    make_group(tmp_path, GROUP | {"memory.max": "max"})
    assert free_in_groups("0::/", tmp_path) == []


def test_host_memory():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_host_bytes() < total
