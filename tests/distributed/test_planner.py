"""`ShardedPlanner` in the place of TorchRec's planner, on models that are not ours."""

import functools
import os
import re
import textwrap
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded import ShardedPlanner, Topology
from dlrm_sharded.drop_in import sharded_planner
from dlrm_sharded.drop_in.job_ranks import rank_in_group
from dlrm_sharded.files.errors import ConfigError, RankError
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.plans.topology_settings import TopologySettings
from dlrm_sharded.ranks.device_memory import available_host_bytes
from dlrm_sharded.ranks.distributed import Rank, detect_topology
from dlrm_sharded.sharders.heuristics import GreedySharder
from tests.distributed.torchrec_modules import table_configs
from tests.preloaded import ROOT
from tests.preloaded.ranks import gathered, run_ranks

pytestmark = pytest.mark.slow

META = torch.device("meta")


def plan_without_torchrun(rank: Rank, hosts: str) -> dict[str, Any]:
    """The process group and the names of the hosts alone say where the ranks are."""
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[key]
    planner = ShardedPlanner(GreedySharder("size"))
    with mock.patch("socket.gethostname", return_value=hosts[rank.rank]):
        me = rank_in_group()
        (module,) = planner.collective_plan(small_dlrm()).plan.values()
        apart = Topology(rank.world_size, 1, local_world_size=1, compute_device="cpu")
        refused = message_of(ShardedPlanner(topology=apart))
    assert planner.report is not None
    return {
        "ranks": gathered(rank, (me.rank, me.local_rank, me.local_world_size, me.world_size)),
        "topology": planner.report.task.topology,
        "used": {r for parameter in module.values() for r in parameter.ranks},
        "refused": refused,
    }


def message_of(planner: ShardedPlanner) -> str:
    try:
        planner.collective_plan(small_dlrm())
    except ConfigError as error:
        return str(error)
    return "no error"


def test_takes_the_ranks_from_the_process_group():
    """Each rank of a host has its share of the memory."""
    found = run_ranks(plan_without_torchrun, 4, "aabb")
    assert found["ranks"] == [(0, 0, 2, 4), (1, 1, 2, 4), (2, 0, 2, 4), (3, 1, 2, 4)]
    assert (found["topology"].world_size, found["topology"].ranks_per_host) == (4, 2)
    assert found["used"] == {0, 1, 2, 3}
    assert "(hosts 4, not 2)" in found["refused"]
    assert found["topology"].memory_bytes < 0.5 * available_host_bytes()
    mixed = run_ranks(plan_without_torchrun, 4, "abab")
    assert mixed["topology"].ranks_per_host == 4, "TorchRec's hosts have successive ranks"


def plan_for_other_ranks(rank: Rank, topologies: list[Topology]) -> list[str]:
    return [message_of(ShardedPlanner(topology=topology)) for topology in topologies]


def test_a_topology_of_another_job_is_refused():
    """Without a job, it is planned."""
    others = [
        Topology(4, 10**6, local_world_size=2),
        Topology(2, 10**6, compute_device="cpu"),
        Topology(2, 10**6, local_world_size=1, compute_device="cpu"),
    ]
    wrong, one_host, right = run_ranks(plan_for_other_ranks, 2, others, local_world_size=1)
    assert "differs from that of the job (ranks 4, not 2; device cuda, not cpu)" in wrong
    assert "differs from that of the job (hosts 1, not 2); " in one_host
    assert right == "no error"
    for topology in others:
        ShardedPlanner(topology=topology).plan(small_dlrm(), get_default_sharders())


def plan_with_memory(rank: Rank, memory_bytes: list[int]) -> list[list[int]]:
    """Ranks of every table, where the ranks found so much memory."""
    sharded_planner.detect_topology = functools.partial(
        detect_topology, TopologySettings(memory_gib=memory_bytes[rank.rank] / GIB)
    )
    return ranks_of_tables()


def test_plans_with_the_memory_of_all_ranks():
    """A table of 50 rows x 16 columns needs 3,200 B: four of them on rank 0, one on rank 1."""
    ranks = run_ranks(plan_with_memory, 2, [4 * 3200, 3200])
    assert sorted(rank for (rank,) in ranks) == [0, 0, 0, 0, 1]


def refuse_on_the_last_rank(rank: Rank) -> list[Any]:
    """In a group without the job's rank 0; what each of the ranks raised."""
    group = torch.distributed.new_group([1, 2])
    outcome = None
    if rank.rank:
        sharded_planner.detect_topology = functools.partial(
            detect_topology,
            TopologySettings(memory_gib=1.0, reserved_gib=2.0 if rank.rank == 2 else 0.0),
        )
        try:
            ranks_of_tables(pg=group)
        except ConfigError as error:
            source = error.__cause__
            assert isinstance(source, RankError)
            outcome = source.failed_rank, str(error), source.reporter != rank.rank
    return gathered(rank, outcome)


def test_what_one_rank_refuses_no_rank_waits_for():
    outside, first, second = run_ranks(refuse_on_the_last_rank, 3)
    assert outside is None
    assert first[:2] == second[:2]
    assert first[0] == 2
    assert "topology.reserved_gib is 2" in first[1]
    assert (first[2], second[2]) == (False, True), "the group's first rank reports it"


def small_dlrm() -> DLRM:
    tables = EmbeddingBagCollection(tables=table_configs([50] * 5, [16]), device=META)
    return DLRM(tables, 3, dense_arch_layer_sizes=[8, 16], over_arch_layer_sizes=[8, 1])


def ranks_of_tables(**options: Any) -> list[list[int]]:
    """The ranks of each table of that model in a collective plan."""
    plan = ShardedPlanner(GreedySharder("size")).collective_plan(small_dlrm(), **options)
    (module,) = plan.plan.values()
    return [parameter.ranks for parameter in module.values()]


EXAMPLE = re.compile(r"^    from dlrm_sharded import .*?\n\n(?=\S)", re.M | re.S)


def run_example(rank: Rank) -> list[str]:
    """Return the names of the sharded tables."""
    (example,) = EXAMPLE.findall((ROOT / "README.md").read_text())
    tables = table_configs([100], [16], name="table", feature="table")
    model = nn.Sequential(EmbeddingBagCollection(tables=tables, device=META))
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
    assert run_ranks(run_example, 2) == ["table0"]
