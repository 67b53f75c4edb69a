"""The private Slurm is one: jobs on two nodes, accounting that tells how they end, no traces."""

import os
import re
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, slurm_cluster

pytestmark = pytest.mark.slow

HETEROGENEOUS_JOB = """\
#!/bin/bash
#SBATCH --ntasks-per-node=1 --cpus-per-task=2 --mem=1000
#SBATCH hetjob
#SBATCH --ntasks-per-node=1 --cpus-per-task=4 --mem=2000
srun hostname : sh -c 'getent hosts "$SLURM_JOB_NODELIST_HET_GROUP_0" >&2; hostname'
"""
REQUEUED_JOB = """\
#!/bin/bash
#SBATCH --partition=low --requeue --open-mode=append
echo "run ${SLURM_RESTART_COUNT:-0}"
test -n "$SLURM_RESTART_COUNT" || sleep 300
"""


def test_a_heterogeneous_job_runs_on_both_nodes(slurm, tmp_path):
    (tmp_path / "job.sh").write_text(HETEROGENEOUS_JOB)
    job = slurm.submit("--output=out", "--error=err", "job.sh", cwd=tmp_path)
    assert slurm.wait_for(job, "COMPLETED", "FAILED", components=2) == ["COMPLETED"] * 2
    assert sorted((tmp_path / "out").read_text().split()) == list(slurm.nodes)
    assert slurm.nodes[0] in (tmp_path / "err").read_text()


def test_accounting_tells_how_jobs_end(slurm, tmp_path):
    good, bad, long = (
        slurm.submit(f"--wrap={command}", cwd=tmp_path)
        for command in ("true", "exit 3", "sleep 300")
    )
    slurm.wait_for(long, "RUNNING")
    slurm.cancel(long)
    assert slurm.wait_for(good, "COMPLETED") == ["COMPLETED"]
    assert slurm.wait_for(bad, "FAILED") == ["FAILED"]
    assert slurm.wait_for(long, "CANCELLED") == ["CANCELLED by 0"]


def test_a_preempted_job_starts_again(slurm, tmp_path):
    (tmp_path / "job.sh").write_text(REQUEUED_JOB)
    job = slurm.submit("--output=out", "job.sh", cwd=tmp_path)
    slurm.wait_for(job, "RUNNING")
    preemptor = slurm.preempt()
    slurm.wait_for(preemptor, "COMPLETED")
    slurm.wait_for(job, "PENDING")
    slurm.start_now(job)
    slurm.wait_for(job, "COMPLETED")
    assert slurm.states(job, all_runs=True) == ["PREEMPTED", "COMPLETED"]
    runs = [line for line in (tmp_path / "out").read_text().splitlines() if line.startswith("run")]
    assert runs == ["run 0", "run 1"]


@pytest.mark.usefixtures("needs_slurm")
def test_no_process_file_or_mount_outlives_it(tmp_path):
    with slurm_cluster(tmp_path / "own", nodes=1) as own:
        settings = (own.folder / "slurm.conf").read_text()
        outside = {Path(path) for path in re.findall(r"/tmp/slurm-\w+", settings)}
        stubborn = own.submit("--wrap=trap '' TERM; sleep 300", cwd=tmp_path)
        waiting = own.submit("--exclusive", "--wrap=true", cwd=tmp_path)
        own.wait_for(stubborn, "RUNNING")
        own.wait_for(waiting, "PENDING")
        assert processes_of(own) != []
        assert [path.is_dir() for path in outside] == [True]
    assert processes_of(own) == []
    assert [path.exists() for path in outside] == [False]
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.usefixtures("needs_slurm")
def test_a_command_left_behind_is_reported_and_killed(tmp_path):
    with (
        pytest.raises(RuntimeError, match=r"outlived its cluster.*sleep 300"),
        slurm_cluster(tmp_path / "own", nodes=1) as own,
    ):
        left = own.popen(["sleep", "300"], cwd=tmp_path)
    with left:
        assert left.wait(10) < 0


@pytest.mark.usefixtures("needs_slurm")
def test_a_failed_start_shows_the_logs(tmp_path):
    (tmp_path / "state").write_text("a file where slurmctld wants a folder")
    with (
        pytest.raises(RuntimeError, match=r"slurmctld has ended.*\n(?s:.*)fatal: .*/state"),
        slurm_cluster(tmp_path, nodes=1),
    ):
        pytest.fail("it has started")


def processes_of(cluster: Cluster) -> list[str]:
    """What has the cluster's settings in its environment."""
    setting = f"SLURM_CONF={cluster.folder}/slurm.conf\0".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int(process.name) != os.getpid() and setting in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found
