"""The TorchX component: `torchx run -s SCHEDULER launch/component.py:train -j 2x8 sharder=dim`.

`launch/component.py` is a link to this file. An installed package has it as `dlrm.train`.
"""

import logging
from typing import Dict, List, Optional  # noqa: UP035, the only types that TorchX's linter knows

from torchx.specs import AppDef, parse_mounts

from dlrm_sharded.checkpoint.folder import FOLDER_KEY
from dlrm_sharded.commands.hydra_app import compose_training
from dlrm_sharded.commands.messages import ended_by_user_errors
from dlrm_torchx.app import JobShape, torchrun_app

log = logging.getLogger(__name__)

TRAINING = "dlrm_sharded.train"


def train(
    *overrides: str,
    m: str = TRAINING,
    j: str = "1x2",
    cpu: int = -1,
    gpu: int = -1,
    memMB: int = 0,  # noqa: N803, as TorchX's own components call it
    max_restarts: int = 0,
    max_retries: int = 0,
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    name: str = "dlrm",
    image: str = "",
    rdzv_port: int = 0,
    mounts: Optional[List[str]] = None,  # noqa: UP006, UP045
) -> AppDef:
    """Train one run under torchrun on all nodes.

    Args:
        overrides: Hydra overrides of conf/train.yaml, such as sharder=dim batch_size=65536
        m: module of the ranks; dlrm_sharded.commands.calibrate measures links between hosts, too
        j: NODESxRANKS: nodes, and ranks on each of them
        cpu: cores of a node; -1 for eight per rank with a GPU, two per rank on the CPU
        gpu: GPUs of a node; -1 for one per rank, if there are any; 0 for ranks on the CPU
        memMB: memory of a node in MiB; 0 leaves it to the scheduler, but containers need a number
        max_restarts: how often torchrun restarts all ranks after one failed
        max_retries: how often the scheduler restarts the job
        env: environment of the ranks, such as NCCL_DEBUG=INFO,A=b
        name: name of the job
        image: container to run in; empty for this environment, on this machine or a shared disk
        rdzv_port: port at which the ranks of several nodes meet; 0 for a random one
        mounts: mounts of the container, such as type=bind,src=/a,dst=/b
    """
    with ended_by_user_errors():
        if m == TRAINING:
            compose_training(overrides)
            if image and not mounts and not any(FOLDER_KEY in word for word in overrides):
                log.warning(
                    "results and checkpoints are lost when the container ends; give --mounts for "
                    "hydra.run.dir, or %s=s3://BUCKET/RUN",
                    FOLDER_KEY,
                )
        return torchrun_app(
            m,
            overrides,
            JobShape(j, cpu, gpu, memMB, max_restarts, max_retries),
            name=name,
            image=image,
            env=env,
            rdzv_port=rdzv_port,
            mounts=parse_mounts(mounts or []),
        )
