"""The README's example of `ShardedPlanner` works as it stands there."""

import re
import textwrap

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dlrm_sharded.model.torchrec_adapter import bag_configs
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.ranks.distributed import Rank
from tests.preloaded import ROOT
from tests.preloaded.ranks import run_ranks

EXAMPLE = re.compile(r"^    from dlrm_sharded import .*?\n\n(?=\S)", re.M | re.S)


def run_example(rank: Rank) -> list[str]:
    """Return the names of the sharded tables."""
    (example,) = EXAMPLE.findall((ROOT / "README.md").read_text())
    tables = bag_configs([Table("table", 100, 16, 20.0)])
    model = nn.Sequential(EmbeddingBagCollection(tables=tables, device=torch.device("meta")))
    names = {
        "dist": dist,
        "model": model,
        "sharders": get_default_sharders(),
        "DistributedModelParallel": DistributedModelParallel,
    }
    exec(textwrap.dedent(example).replace('device="cuda"', 'device="cpu"'), names)
    (module_plan,) = names["plan"].plan.values()
    assert isinstance(names["model"], DistributedModelParallel)
    return sorted(module_plan)


def test_planner_of_the_readme():
    assert run_ranks(run_example, 2) == ["table"]
