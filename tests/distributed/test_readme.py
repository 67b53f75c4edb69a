"""The README's example in a TorchRec model works as it stands there."""

import re
import textwrap

import pytest
import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.model.torchrec_adapter import bag_configs
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.ranks.distributed import Rank
from tests.preloaded import ROOT
from tests.preloaded.ranks import run_ranks

pytestmark = pytest.mark.slow
EXAMPLE = re.compile(r"^    from dlrm_sharded import .*?\n\n(?=\S)", re.M | re.S)


def run_example(rank: Rank) -> list[str]:
    """Return the names of the sharded tables."""
    (example,) = EXAMPLE.findall((ROOT / "README.md").read_text())
    tables = bag_configs([Table("table", 100, 16, 20.0)])
    model = nn.Sequential(EmbeddingBagCollection(tables=tables, device=torch.device("meta")))
    names = {
        "model": model,
        "batches": [KeyedJaggedTensor(["table"], torch.arange(8), lengths=torch.full((4,), 2))],
    }
    exec(textwrap.dedent(example), names)
    (module_plan,) = names["plan"].plan.values()
    assert isinstance(names["model"], DistributedModelParallel)
    assert names["report"].task.tables[0].pooling_factor == 2.0
    return sorted(module_plan)


def test_planner_of_the_readme():
    assert run_ranks(run_example, 2) == ["table"]
