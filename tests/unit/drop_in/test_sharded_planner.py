"""`ShardedPlanner`: what it finds in a TorchRec model, what it says, and what it refuses."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ShardingPlan as TorchRecPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dlrm_sharded import ShardedPlanner, Topology, plan_model, read_plan, read_task, validate
from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.cost.cost_model_file import costs_digest, read_cost_model
from dlrm_sharded.drop_in.find_tables import find_tables
from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError, InvalidPlanError
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.model.fused_optimizers import fuse
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.sharders.base import SharderContext
from dlrm_sharded.sharders.heuristics import GreedySharder
from dlrm_sharded.sharders.search import SearchSharder
from tests.distributed.torchrec_modules import LaidOut
from tests.unit.drop_in.synthetic import (
    META,
    MODEL,
    ROWS,
    SHARDERS,
    TOPOLOGY,
    all_rows,
    bags,
    plan,
    replicas,
    sequences,
    types,
)
from tests.unit.synthetic import column_shards

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_a_table_that_several_features_look_up_sends_a_vector_for_each():
    shared = EmbeddingBagConfig(
        name="t", num_embeddings=60, embedding_dim=64, feature_names=["f", "g", "h"]
    )
    seen = LaidOut(all_rows)
    planned = []
    seen.shard = lambda task: planned.append(task) or LaidOut(all_rows).shard(task)
    plan(EmbeddingBagCollection(tables=[shared], device=META), seen)
    assert [table.num_features for table in planned[0].tables] == [3]


def test_tables_know_their_module_and_whether_it_pools():
    found = find_tables(
        nn.ModuleDict({"bags": bags(), "deep": nn.ModuleDict({"sequences": sequences()})}),
        get_default_sharders(),
        TOPOLOGY,
    )
    kinds = [{(table.module, table.pooled) for table in m.tables.values()} for m in found]
    assert kinds == [{("bags", True)}, {("deep.sequences", False)}]


@pytest.mark.parametrize("name", SHARDERS)
def test_no_table_is_replicated_where_no_constraint_says_so(name):
    assert "data_parallel" not in types(plan(bags(), SHARDERS[name]())[""])


def test_the_report_has_the_cost_and_the_bound(caplog):
    planner = ShardedPlanner(SHARDERS["search"](), topology=TOPOLOGY, global_batch_size=65_536)
    with caplog.at_level(logging.INFO):
        planner.plan(bags(), get_default_sharders())
    assert str(planner.report) in caplog.messages
    assert "another device" not in caplog.text
    said = re.search(
        r"^search.*: 6 tables on 4 ranks, predicted (.*) ms \(prior\), at most "
        r"(.*) % above the lower bound; critical path (.*) ms$",
        str(planner.report),
    )
    assert said is not None
    cost_ms, gap, path_ms = map(float, said.groups())
    bound_ms = planner.report.bound_ms
    assert 0 < bound_ms <= cost_ms <= path_ms
    assert gap == pytest.approx(100 * (cost_ms / bound_ms - 1), abs=1.0)


def test_one_table_on_one_rank_is_said_in_the_singular():
    planner = ShardedPlanner(GreedySharder("dim"), topology=Topology(1, 10**9), cost_model=None)
    config = EmbeddingBagConfig(name="t", num_embeddings=60, embedding_dim=64, feature_names=["f"])
    only = EmbeddingBagCollection(tables=[config], device=META)
    planner.plan(only, get_default_sharders())
    assert ": 1 table on 1 rank; " in str(planner.report)


@pytest.mark.parametrize("by", ["sharder", "report"])
def test_costs_of_another_device_are_named(by, caplog):
    """They are those of GPUs, and the ranks are CPUs."""
    run = RunContext(device="cuda")
    cost_model = learned_cost_model(run)
    sharder = SearchSharder(SharderContext(run, cost_model), patience=1)
    planner = ShardedPlanner(
        sharder if by == "sharder" else GreedySharder("dim"),
        topology=TOPOLOGY,
        cost_model=cost_model if by == "report" else None,
    )
    planner.plan(bags(), get_default_sharders())
    [warning] = [r.getMessage() for r in caplog.records if "another device" in r.getMessage()]
    assert "RunContext(device='cpu')" in warning
    assert ("(see the caveat)" in str(planner.report)) == (by == "report")
    assert "lower bound" not in str(planner.report)


def test_shards_of_a_table_on_one_rank_have_places_of_their_own():
    """As the search has them of tables wider than a lookup; runs train such plans, too."""

    def halves(table: Table, i: int, world_size: int) -> list[Shard]:
        return column_shards(table, (0, 32), (0, 32))

    for parameter in plan(bags(), LaidOut(halves))[""].values():
        assert parameter.ranks == [0, 0]
        assert [s.shard_offsets[1] for s in parameter.sharding_spec.shards] == [0, 32]


def test_replicas_that_nobody_asked_for_are_refused():
    with pytest.raises(InvalidPlanError, match=r"planned data_parallel; its.*: plan without repl"):
        plan(bags(), LaidOut(replicas))


@pytest.mark.parametrize("name", SHARDERS)
def test_half_tables_count_as_such(name):
    """All tables fit one rank of two in fp16, and not in fp32."""
    size = sum(ROWS) * 64 * 2
    topology = Topology(2, size // 2 + 10**6, compute_device="cpu")
    assert len(plan(bags(DataType.FP16), SHARDERS[name](), topology)[""]) == len(ROWS)
    with pytest.raises(InfeasibleTaskError):
        plan(bags(), SHARDERS[name](), topology)


def test_precisions_that_a_plan_does_not_know(caplog):
    with pytest.raises(ConfigError, match=r"'t0' of EmbeddingBagCollection has weights in int8"):
        plan(bags(DataType.INT8), GreedySharder("dim"))
    context = SharderContext(cost_model=MODEL)
    with pytest.raises(InvalidPlanError, match="planned in fp16, and the model has it in fp32"):
        plan(bags(), SearchSharder(context, table_precision="fp16", patience=1))
    plan(bags(), SearchSharder(context, exchange_precision="fp16", patience=1))
    assert "exchanges in fp16" in caplog.text


@pytest.mark.parametrize("shares", ["module", "weight"])
def test_tables_that_two_places_share_are_refused(shares):
    """TorchRec would train them apart, and leave a module unsharded where it is found again."""
    one = other = bags()
    if shares == "weight":
        other = bags()
        other.embedding_bags["t0"].weight = one.embedding_bags["t0"].weight
    with pytest.raises(ConfigError, match=r"'t0' of module 'b' .* is also one of module 'a'"):
        plan(nn.ModuleDict({"a": one, "b": other}), GreedySharder("dim"))


def test_tables_that_should_not_train_are_named(caplog):
    """TorchRec's fused lookups have no regard for it."""
    model = bags()
    frozen = next(iter(model.parameters()))
    frozen.requires_grad_(False)
    plan(model, GreedySharder("dim"), Topology(2, 2**30, compute_device="cpu"))
    [warning] = [message for message in caplog.messages if "requires_grad=False" in message]
    assert "a learning rate of 0 keeps their weights" in warning


NAMED: dict[str, Any] = {"topology": TOPOLOGY, "patience": 1, "cost_model": MODEL}


def test_a_name_makes_the_planner_of_runs(tmp_path: Path) -> None:
    """With the cost, its bound and a diagnosis, in the files that a run writes."""
    plan, report = plan_model(bags(), batch_size=1024, output_dir=tmp_path, **NAMED)
    assert len(plan.plan[""]) == 6
    assert report.details.sharder == "search"
    assert report.task.batch_size == 1024 * 4
    assert report.cost_ms is not None
    assert report.bound_ms is not None
    assert 0 < report.bound_ms <= report.cost_ms <= (report.critical_path_ms or 0)
    assert report.details.diagnosis is not None
    assert report.files == (tmp_path / "plan.json", tmp_path / "task.json")
    assert str(tmp_path / "plan.json") in str(report)
    validate(read_plan(report.files[0]), read_task(report.files[1]))
    made_from = json.loads(report.files[0].read_text())["made_from"]
    assert made_from["sharder"]["patience"] == 1
    beside = read_cost_model(tmp_path / "prices.safetensors")
    assert costs_digest(beside) == made_from["prices_digest"]


def test_a_plan_that_was_made_before_is_taken(tmp_path: Path) -> None:
    made, report = plan_model(bags(), "size", topology=TOPOLOGY, output_dir=tmp_path)
    again, taken = plan_model(bags(), topology=TOPOLOGY, plan=tmp_path / "plan.json")
    assert taken.details.sharder == "plan_file"
    assert taken.plan == report.plan
    assert {name: p.ranks for name, p in again.plan[""].items()} == {
        name: p.ranks for name, p in made.plan[""].items()
    }
    with pytest.raises(InvalidPlanError):
        plan_model(bags(), topology=Topology(2, 10**9), plan=tmp_path / "plan.json")


def test_costs_are_those_that_a_run_finds() -> None:
    """The task is of this hardware and its fused optimizer, whose state is memory."""
    model = bags()
    fuse("rowwise_adagrad", model.parameters(), 0.1)
    planner = ShardedPlanner(GreedySharder("size"), topology=TOPOLOGY)
    planner.plan(model, get_default_sharders())
    assert planner.report is not None
    assert planner.report.details.provenance is not None
    assert planner.report.error is not None
    # Both depend on the machine: the costs of the package are of one that others are like.
    assert re.search(r"\((prior|calibrated), within ", str(planner.report))
    assert planner.report.task.topology.optimizer_bytes_per_row == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 1, "global_batch_size": 4}, "both given"),
        ({"global_batch_size": 0}, "global_batch_size"),
        ({"cost_model": "learned"}, "cost_model is 'learned'"),
        ({"patence": 1, "cost_model": None}, "no option 'patence'"),
        ({"sharder": GreedySharder("size"), "patience": 1}, "is an object, so 'patience' has no"),
        ({"sharder": "torchrec", "plan": "plan.json", "full": True}, "given, so 'full' has no"),
        ({"pooling_factors": [2.0] * len(ROWS)}, "is of type list; give a dict by table name"),
        ({"plan": TorchRecPlan({})}, r"of TorchRec; give the path of a plan\.json"),
        ({"topology": 8}, "topology is of type int; give a dlrm_"),
    ],
)
def test_an_argument_that_is_wrong(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_model(bags(), **{"topology": TOPOLOGY, **options})
