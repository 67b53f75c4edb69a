"""The memory of this host, with the limits of control groups."""

import os
from pathlib import Path

import pytest

from dlrm_sharded.ranks.device_memory import available_host_bytes, free_in, memory_groups

V2 = {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 1\ninactive_file 200"}
V1 = {
    "memory.limit_in_bytes": "1000",
    "memory.usage_in_bytes": "700",
    "memory.stat": "cache 1\ninactive_file 9\ntotal_inactive_file 200",
}
UNLIMITED_V1 = V1 | {"memory.limit_in_bytes": str(2**63 - 4096)}


def make_group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("text", "folder", "files"),
    [
        ("0::/job/step", "job/step", V2),
        ("0::/job/step", "job", V2),
        ("0::/not/shown", "", V2),
        ("5:cpu:/a\n4:memory:/job/step\n0::/", "memory/job/step", V1),
        ("4:hugetlb,memory:/job/step", "memory/job", V1),
        ("4:memory:/not/shown", "memory", V1),
    ],
    ids=["v2", "v2_above", "v2_container", "v1", "v1_above", "v1_container"],
)
def test_a_control_group_limits_the_memory(text, folder, files, tmp_path):
    """Page cache that the kernel frees on demand does not count as used."""
    make_group(tmp_path / folder, files)
    groups = memory_groups(text, tmp_path)
    assert [free for group in groups if (free := free_in(group)) is not None] == [500]


@pytest.mark.parametrize("files", [V2 | {"memory.max": "max"}, UNLIMITED_V1], ids=["v2", "v1"])
def test_a_control_group_without_a_limit(files, tmp_path):
    make_group(tmp_path, files)
    assert (free_in(tmp_path) or 2**62) > 2**61


def test_host_memory():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_host_bytes() < total
