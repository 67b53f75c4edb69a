"""torchrun on every node of a job, as a TorchX app.

The component and the sweep launcher describe their jobs with the same words, `JobShape`, and both
make them here.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchx.specs import AppDef, Resource, Role, macros
from torchx.specs.api import BindMount, DeviceMount, VolumeMount
from torchx.specs.finder import ComponentValidationException

from dlrm_sharded.errors import ConfigError, check_count

ROLE = "train"
CPUS_PER_RANK = 2
RENDEZVOUS_PORTS = range(20_000, 32_000)
"""Below those that Linux gives to outgoing connections."""

SHUTDOWN_S = 8
"""From SIGTERM to SIGKILL inside a job, before those outside lose patience: TorchX on this machine
after 10 s, Slurm after 30. torch 2.11 does not know it, and waits for 30."""


class JobRefusedError(ConfigError, ComponentValidationException):
    """A job that cannot run as it was asked for; `torchx run` too shows its message alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """How many ranks a job has, what its nodes must have, and how often it is tried.

    Args:
        num_nodes, ranks_per_node: the ranks.
        cpus, gpus: cores and GPUs of a node.
        memory_mb: memory of a node in 2**20 B; 0 leaves it to the scheduler.
        max_restarts: how often torchrun starts all ranks again in the same job.
        max_retries: how often the scheduler starts the job again.
    """

    num_nodes: int
    ranks_per_node: int
    cpus: int
    gpus: int
    memory_mb: int
    max_restarts: int
    max_retries: int

    @classmethod
    def of(
        cls,
        *,
        j: str,
        cpu: int,
        gpu: int,
        memMB: int,  # noqa: N803, as TorchX's own components call it
        max_restarts: int,
        max_retries: int,
    ) -> JobShape:
        """The shape in the words of the command line; -1 is a default that depends on `j`.

        Raises:
            ConfigError: what is wrong with which option.
        """
        parts = re.fullmatch(r"(\d+)x(\d+)", str(j))
        if parts is None or "0" in parts.groups():
            raise ConfigError(f"j is {j!r}, must be NODESxRANKS, such as 1x2 or 2x8")
        num_nodes, ranks_per_node = int(parts[1]), int(parts[2])
        for option, value, least in (
            ("cpu", cpu, 1 if cpu != -1 else -1),
            ("gpu", gpu, -1),
            ("memMB", memMB, 0),
            ("max_restarts", max_restarts, 0),
            ("max_retries", max_retries, 0),
        ):
            check_count(option, value, least=least)
        if 0 < gpu < ranks_per_node:
            raise ConfigError(
                f"j is {j!r}, but gpu is {gpu}: a node has no more ranks than GPUs; "
                f"give j={num_nodes}x{gpu}, or gpu=0 for ranks on the CPU"
            )
        return cls(
            num_nodes=num_nodes,
            ranks_per_node=ranks_per_node,
            cpus=ranks_per_node * CPUS_PER_RANK if cpu < 0 else cpu,
            gpus=ranks_per_node if gpu < 0 else gpu,
            memory_mb=memMB,
            max_restarts=max_restarts,
            max_retries=max_retries,
        )


def torchrun_app(
    module: str,
    arguments: Sequence[str],
    shape: JobShape,
    *,
    name: str,
    image: str = "",
    env: Mapping[str, str] | None = None,
    rdzv_port: int = 0,
    mounts: Sequence[BindMount | VolumeMount | DeviceMount] = (),
) -> AppDef:
    """An app that runs `python -m module arguments` on every rank.

    Args:
        image: the container to run in, with the package installed for its `python`; empty for this
            very environment, found by path: on this machine, or on a cluster that shares its disk.
        rdzv_port: where the ranks of several nodes meet; 0 for one by chance, as two jobs with the
            same one on the same node would meet each other.
    """
    port = rdzv_port or random.choice(RENDEZVOUS_PORTS)
    environment = {
        # Without this, restarted gloo ranks meet the store of those before them (pytorch #135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S),
        # Ranks take the GPUs that they see.
        **({"CUDA_VISIBLE_DEVICES": ""} if shape.gpus == 0 else {}),
        # TorchX looks for its own `${...}` in values too.
        **{key: value.replace("$", "$$") for key, value in (env or {}).items()},
    }
    command = torchrun_command(
        module,
        arguments,
        shape,
        python="python" if image else sys.executable,
        rdzv_port=port,
    )
    role = Role(
        name=ROLE,
        image=image,
        entrypoint="bash",
        args=["-c", command],
        env=environment,
        num_replicas=shape.num_nodes,
        max_retries=shape.max_retries,
        resource=Resource(cpu=shape.cpus, gpu=shape.gpus, memMB=shape.memory_mb),
        port_map={"c10d": port} if shape.num_nodes > 1 else {},
        mounts=list(mounts),
    )
    return AppDef(name=name, roles=[role])


def torchrun_command(
    module: str, arguments: Sequence[str], shape: JobShape, *, python: str, rdzv_port: int
) -> str:
    """For bash on every node, after TorchX has put its own values for `${...}`."""
    # A thread too many costs more than one too few: no more than the node has, or was asked for.
    threads = (
        f"n=$$(nproc); n=$$(( (n < {shape.cpus} ? n : {shape.cpus}) / {shape.ranks_per_node} )); "
        "export OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$(( n > 0 ? n : 1 ))}"
    )
    endpoint = "localhost:0"
    if shape.num_nodes > 1:
        # Some schedulers tell every node but the first where the first one is.
        endpoint = f'"$${{{macros.rank0_env}:=localhost}}:{rdzv_port}"'
    torchrun = [
        *(_quoted(python), "-m", "torch.distributed.run"),
        *("--nnodes", shape.num_nodes, "--nproc-per-node", shape.ranks_per_node),
        *("--rdzv-backend", "c10d", "--rdzv-id", macros.app_id, "--rdzv-endpoint", endpoint),
        *("--max-restarts", shape.max_restarts),
        # Slurm warns with SIGUSR1, which would end torchrun and leave its ranks behind.
        *("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"),
        *("-m", module),
    ]
    return f"{threads}; exec {' '.join([*map(str, torchrun), *map(_quoted, arguments)])}"


def _quoted(word: str) -> str:
    """For bash, and for TorchX, which looks for its own `${...}`."""
    return shlex.quote(word).replace("$", "$$")


def visible_gpus() -> list[str]:
    """GPUs that a process started here would see, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        try:
            command = ["nvidia-smi", "-L"]
            listed = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return []
        count = sum(line.startswith("GPU") for line in listed.stdout.splitlines())
        return [str(i) for i in range(count)]
    names = [name.strip() for name in visible.split(",")]
    # As CUDA does: none after the first that is none.
    return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))
