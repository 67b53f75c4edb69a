"""The TorchX component: what it asks of schedulers, and what it refuses before they are asked."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torchx.specs import Role, macros
from torchx.specs.finder import get_component

from dlrm_sharded.files.errors import ConfigError
from dlrm_torchx.app import JobShape, torchrun_command
from tests import preloaded
from tests.nvidia import install_nvidia_smi
from tests.preloaded import ROOT

TORCHX = str(Path(sys.executable).with_name("torchx"))
COMPONENT = "launch/component.py:train"


def torchx(
    *arguments: str, path: str | None = None, gpus: str = "", exit_code: int | None = 0
) -> preloaded.Ended:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": gpus} | ({"PATH": path} if path else {})
    return preloaded.run(TORCHX, *arguments, env=env, exit_code=exit_code)


def dryrun(scheduler: str, *arguments: str) -> str:
    """The request as `torchx run --dryrun` shows it, on one line."""
    done = torchx("run", "--dryrun", "-s", scheduler, "--workspace", "", *arguments)
    return " ".join(done.stdout.partition("=== SCHEDULER REQUEST ===")[2].split())


def shape(**given: object) -> JobShape:
    return JobShape(**{"j": "1x2", **given})  # type: ignore[arg-type]


def test_passes_torchxs_own_checks():
    assert get_component(str(ROOT / COMPONENT)).validation_errors == []


@pytest.mark.slow
def test_a_cluster_is_calibrated_by_all_its_ranks():
    module = ("-m", "dlrm_sharded.commands.calibrate")
    ranks = ("-j", "2x8", "--rdzv_port", "29400")
    request = dryrun("slurm", COMPONENT, *module, *ranks, "minutes=10")
    assert request.count("--nnodes 2 --nproc-per-node 8") == 2
    assert request.count("-m dlrm_sharded.commands.calibrate minutes=10") == 2


@pytest.mark.parametrize(
    ("given", "cpus", "threads"),
    [
        ({"j": "1x4"}, 32, 2),
        ({"j": "1x4", "gpu": 0}, 8, 2),
        ({"j": "1x4", "cpu": 18}, 18, 4),
        ({"j": "1x4", "gpu": 0, "cpu": 3}, 3, 1),
    ],
    ids=str,
)
def test_cores_and_threads(given, cpus, threads):
    """Ranks with GPUs get cores for threads that are not OpenMP's."""
    found = shape(**given)
    assert (found.cpus, found.threads_per_rank) == (cpus, threads)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"j": "2"}, "j is '2'; it must be NODESxRANKS"),
        ({"j": "0x2"}, "j is '0x2'"),
        ({"j": "1x2x3"}, "j is '1x2x3'"),
        ({"j": "1x8", "gpu": 4}, "gpu is 4"),
        ({"gpu": -2}, "gpu is -2; it must be an integer >= -1"),
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"memMB": -1}, "memMB is -1"),
    ],
    ids=str,
)
def test_refuses_a_shape(given, said):
    with pytest.raises(ConfigError, match=said):
        shape(**given)


@pytest.mark.parametrize("override", ["a='b c'", "run=${now:%Y}", 'x="y"', "l=[1,2]", "s=$HOME"])
def test_overrides_pass_templates_and_bash_unchanged(override):
    command = torchrun_command(
        "json.tool", [override], shape(), python="echo", rdzv_port=29400
    ).replace("exec echo", "printf '%s\\n'")
    # As TorchX replaces its own values and leaves the rest to bash.
    role = macros.Values(
        img_root="", app_id="app_1", replica_id="0", rank0_env="TORCHX_RANK0_HOST"
    ).apply(Role(name="train", image="", args=[command]))
    done = subprocess.run(
        ["bash", "-c", role.args[0]], capture_output=True, text=True, check=True, env=os.environ
    )
    words = done.stdout.splitlines()
    assert words[-1] == override
    assert "app_1" in words


def test_slurm_request():
    request = dryrun(
        *("slurm", COMPONENT, "-j", "2x4", "--gpu", "8", "--cpu", "32", "--memMB", "64000"),
        *("--max_retries", "3", "--max_restarts", "1", "--env", "NCCL_DEBUG=INFO,A=b"),
        *("--rdzv_port", "29400", "sharder=dim", "batch_size=4096"),
    )
    nodes = request.count("--ntasks-per-node=1 --cpus-per-task=32 --mem=64000 --gpus-per-task=8")
    assert nodes == request.count("--job-name=dlrm/train-") == 2
    assert "TORCHX_MAX_RETRIES=3" in request
    assert request.count("--nnodes 2 --nproc-per-node 4") == 2
    assert request.count("${SLURM_JOB_NODELIST_HET_GROUP_0:=localhost}:29400") == 2
    assert request.count("--max-restarts 1") == 2
    assert request.count("-m dlrm_sharded.train sharder=dim batch_size=4096") == 2
    assert request.count("NCCL_DEBUG=INFO,A=b") == 2
    # The steps ask for their job's cores, and write where `torchx log` looks.
    assert request.count("--cpus-per-task=32") == 4
    assert request.count(f'{ROOT}/runs/slurm/slurm-"$SLURM_JOB_ID"-train-') == 4


@pytest.mark.slow
def test_kubernetes_request():
    """A volume claim for runs outlives the pods."""
    mounts = "type=bind,src=/datasets,dst=/mnt/data,type=volume,src=training-runs,dst=/mnt/runs"
    request = dryrun(
        *("kubernetes", "-cfg", "queue=training", COMPONENT, "-j", "2x8", "--image", "dlrm:1"),
        *("--memMB", "64000", "--rdzv_port", "29400"),
        *("--mounts", mounts, "sharder=dim", "hydra.run.dir=/mnt/runs/mine", "resume=auto"),
    )
    for text, count in {
        "queue: training": 1,
        "image: dlrm:1": 2,
        "nvidia.com/gpu: '8'": 4,  # a limit and a request each
        "memory: 64000M": 2,
        "--nnodes 2 --nproc-per-node 8": 2,
        # The container's own Python, not the one that submits.
        "exec python -m dlrm_sharded.ranks.torchrun": 2,
        sys.executable: 0,
        "-m dlrm_sharded.train sharder=dim": 2,
        "claimName: training-runs": 2,
        "mountPath: /mnt/runs": 2,
        "hostPath: path: /datasets": 2,
        "mountPath: /mnt/data": 2,
        "hydra.run.dir=/mnt/runs/mine resume=auto": 2,
    }.items():
        assert request.count(text) == count, text
    assert "${VC_TRAIN_0_HOSTS:=localhost}:29400" in request


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-s", "nowhere", COMPONENT], ["-s/--scheduler", "'nowhere'", "slurm", "local_cwd"]),
        (["-s", "local_cwd", COMPONENT, "--gpus", "4"], ["--gpus", "[--gpu int]"]),
        (["-s", "local_cwd", COMPONENT, "-j", "2"], ["error: j is '2'"]),
        (["-s", "local_cwd", COMPONENT, "batchsize=4"], ["error: ", "batchsize", "batch_size"]),
    ],
    ids=lambda value: " ".join(value[2:]) if isinstance(value, list) else None,
)
def test_refused_before_submission(arguments, said):
    done = torchx("run", *arguments, exit_code=2)
    for word in said:
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert "://" not in done.stdout  # no app was started


@pytest.mark.slow
@pytest.mark.parametrize(
    ("j", "gpu", "visible", "given"),
    [
        ("2x2", -1, "4,5,6,7", ["4,5", "6,7"]),
        ("1x1", 2, "GPU-1,GPU-3", ["GPU-1,GPU-3"]),
        ("1x2", 0, "4,5", [""]),
        ("1x2", -1, "-1", []),
    ],
)
def test_gpus_of_this_machine(j, gpu, visible, given, tmp_path):
    """Those that are visible, shared out to the nodes; none of them for ranks on the CPU."""
    done = torchx(
        *("run", "--dryrun", "-s", "local_cwd", COMPONENT, "-j", j, "--gpu", str(gpu)),
        path=install_nvidia_smi(tmp_path, 8),
        gpus=visible,
    )
    replicas = done.stdout.partition("role_params")[2]
    assert re.findall(r"'CUDA_VISIBLE_DEVICES': '([^']*)'", replicas) == given
    assert ("'DLRM_SHARDED_DEVICE': 'cpu'" in replicas) == (gpu == 0)
