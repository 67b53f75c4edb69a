"""Makes TorchX apps that run our torchrun on every node of a job.

Both the component and the sweep launcher describe their jobs by a `JobShape`.
"""

from __future__ import annotations

import random
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchx.specs import AppDef, Resource, Role, macros
from torchx.specs.api import BindMount, DeviceMount, VolumeMount
from torchx.specs.finder import ComponentValidationException

from dlrm_sharded.files.errors import ConfigError, check_count
from dlrm_sharded.ranks.gpus import DEVICE_VARIABLE

ROLE = "train"
THREADS_PER_RANK = 2
CORES_PER_GPU = 8
"""Cores for the threads of a rank on a GPU: OpenMP, autograd, NCCL, and reading data."""

RENDEZVOUS_PORTS = range(20_000, 32_000)
"""Ports below those that Linux uses for outgoing connections."""


class JobRefusedError(ConfigError, ComponentValidationException):
    """A job that cannot run as requested; `torchx run` also shows only the message."""


@dataclass(frozen=True)
class JobShape:
    """Ranks of a job, resources of its nodes, and number of attempts; -1 for a default by `j`.

    Args:
        j: NODESxRANKS, nodes and ranks on each of them.
        cpu, gpu: cores and GPUs of a node.
        memMB: memory of a node in 2**20 B; 0 leaves it to the scheduler.
        max_restarts: how often torchrun restarts all ranks in the same job.
        max_retries: how often the scheduler restarts the job.

    Raises:
        ConfigError: an option has a wrong value; the message names it.
    """

    j: str
    cpu: int = -1
    gpu: int = -1
    memMB: int = 0  # noqa: N815, as TorchX's own components call it
    max_restarts: int = 0
    max_retries: int = 0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"0*[1-9]\d*x0*[1-9]\d*", str(self.j)):
            raise ConfigError(f"j is {self.j!r}; it must be NODESxRANKS, such as 1x2 or 2x8")
        check_count("cpu", self.cpu, least=1 if self.cpu != -1 else -1)
        check_count("gpu", self.gpu, least=-1)
        for option in ("memMB", "max_restarts", "max_retries"):
            check_count(option, getattr(self, option), least=0)
        if 0 < self.gpu < self.ranks_per_node:
            raise ConfigError(
                f"j is {self.j!r}, but gpu is {self.gpu}: every rank needs a GPU of its own; "
                f"give j={self.num_nodes}x{self.gpu}, or gpu=0 for ranks on the CPU"
            )

    @property
    def num_nodes(self) -> int:
        return int(self.j.partition("x")[0])

    @property
    def ranks_per_node(self) -> int:
        return int(self.j.partition("x")[2])

    @property
    def gpus(self) -> int:
        return self.ranks_per_node if self.gpu < 0 else self.gpu

    @property
    def cpus(self) -> int:
        cores_per_rank = CORES_PER_GPU if self.gpus else THREADS_PER_RANK
        return self.ranks_per_node * cores_per_rank if self.cpu < 0 else self.cpu

    @property
    def threads_per_rank(self) -> int:
        """OpenMP threads of a rank, if the node has a core for each."""
        return THREADS_PER_RANK if self.cpu < 0 else max(self.cpu // self.ranks_per_node, 1)


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
    """Make an app that runs `python -m module arguments` on every rank.

    Args:
        image: container to run in, whose `python` has the package installed; empty for this
            environment, by its path, on this machine or on a cluster that shares its disk.
        rdzv_port: port at which the ranks of several nodes meet; 0 for a random one, because two
            jobs with the same port on a node would join each other.
    """
    port = rdzv_port or random.choice(RENDEZVOUS_PORTS)
    environment = {
        **({"CUDA_VISIBLE_DEVICES": "", DEVICE_VARIABLE: "cpu"} if shape.gpus == 0 else {}),
        # TorchX also substitutes its own `${...}` in values.
        **{key: value.replace("$", "$$") for key, value in (env or {}).items()},
    }
    command = torchrun_command(
        module, arguments, shape, python="python" if image else sys.executable, rdzv_port=port
    )
    role = Role(
        name=ROLE,
        image=image,
        entrypoint="bash",
        args=["-c", command],
        env=environment,
        num_replicas=shape.num_nodes,
        max_retries=shape.max_retries,
        resource=Resource(cpu=shape.cpus, gpu=shape.gpus, memMB=shape.memMB),
        port_map={"c10d": port} if shape.num_nodes > 1 else {},
        mounts=list(mounts),
    )
    return AppDef(name=name, roles=[role])


def torchrun_command(
    module: str, arguments: Sequence[str], shape: JobShape, *, python: str, rdzv_port: int
) -> str:
    """Return the command for bash on every node; TorchX substitutes its own `${...}` first.

    Too many threads cost more than too few, so OMP_NUM_THREADS is lower than requested if the node
    has fewer cores.
    """
    most = shape.threads_per_rank
    threads = (
        f"n=$$(( $$(nproc) / {shape.ranks_per_node} )); n=$$(( n < {most} ? n : {most} )); "
        "export OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$(( n > 0 ? n : 1 ))}"
    )
    endpoint = "localhost:0"
    if shape.num_nodes > 1:
        # Some schedulers give the first node's address only to the other nodes.
        endpoint = f'"$${{{macros.rank0_env}:=localhost}}:{rdzv_port}"'
    torchrun = [
        *(_quoted(python), "-m", "dlrm_sharded.ranks.torchrun"),
        *("--nnodes", shape.num_nodes, "--nproc-per-node", shape.ranks_per_node),
        *("--rdzv-backend", "c10d", "--rdzv-id", macros.app_id, "--rdzv-endpoint", endpoint),
        *("--max-restarts", shape.max_restarts),
        *("-m", module),
    ]
    return f"{threads}; exec {' '.join([*map(str, torchrun), *map(_quoted, arguments)])}"


def _quoted(word: str) -> str:
    """Quote a word for bash, and for TorchX, which substitutes its own `${...}`."""
    return shlex.quote(word).replace("$", "$$")
