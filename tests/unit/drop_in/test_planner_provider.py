"""TorchRec's own dry run plans with our sharders, from TorchRec 1.9 on."""

import contextlib
import io
from typing import Any

import pytest
from torchrec.distributed.sharding_plan import get_default_sharders

from dlrm_sharded import ConfigError, ShardedPlannerProvider
from dlrm_sharded.plans.layouts import Replicas
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.sharders.heuristics import GreedySharder
from tests.distributed.torchrec_modules import LaidOut
from tests.unit.drop_in.test_sharded_planner import bags

try:
    from torchrec.distributed.planner.dry_run import (
        DryRunOrchestrator,
        DryRunRequest,
        DryRunResult,
        SkuOverride,
    )
    from torchrec.distributed.planner.executor import DefaultPlannerExecutor
    from torchrec.distributed.planner.provider import PlannerProvider
    from torchrec.distributed.planner.types import (
        PlannerConfig,
        PlannerErrorType,
        PlannerSessionContext,
        PlannerVariant,
        StorageReservationPolicy,
    )

    HAS_SEAMS = True
except ImportError:
    HAS_SEAMS = False

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
needs_seams = pytest.mark.skipif(
    not HAS_SEAMS, reason="this TorchRec has no PlannerProvider; install torchrec >= 1.9"
)


@pytest.mark.skipif(HAS_SEAMS, reason="this TorchRec has a PlannerProvider")
def test_an_older_torchrec_is_named() -> None:
    with pytest.raises(ConfigError, match=r"needs TorchRec 1.9 or newer; .* ShardedPlanner"):
        ShardedPlannerProvider("size")


def dry_run(
    *skus: str, provider: Any = None, config: dict[str, Any] | None = None, **stated: Any
) -> tuple[dict[str, "DryRunResult"], "PlannerSessionContext"]:
    """Return the results of TorchRec's dry run, by SKU, and its session."""
    # Without a reserve, so that memory can be compared.
    options = {"storage_reservation_policy": StorageReservationPolicy.FIXED_PERCENTAGE}
    options |= {"storage_reservation_percentage": 0.0, **(config or {})}
    request = DryRunRequest(
        model=bags(),
        sharders=get_default_sharders(),
        sku_list=list(skus),
        training_framework="apf",
        world_size=stated.pop("world_size", 4),
        local_world_size=stated.pop("local_world_size", 4),
        batch_size=256,
        planner_config=PlannerConfig(**options),
        **stated,
    )
    session = PlannerSessionContext(request=request, results={})
    chosen = provider or ShardedPlannerProvider("neuroshard", patience=1)
    with contextlib.redirect_stdout(io.StringIO()):
        results = DryRunOrchestrator(DefaultPlannerExecutor(chosen)).plan(request, session)
    return dict(results), session


def spied(sharder: Any = "size", **options: Any) -> tuple[ShardedPlannerProvider, list[Any]]:
    """Return a provider, and the list of the planners that it builds."""
    provider, built = ShardedPlannerProvider(sharder, **options), []
    build = provider.build_planner

    def spy(*args: Any, **kwargs: Any) -> Any:
        built.append(build(*args, **kwargs))
        return built[-1]

    provider.build_planner = spy  # type: ignore[method-assign]
    return provider, built


@needs_seams
def test_dry_run_over_two_kinds_of_hardware() -> None:
    """Each has the memory, links and prices of its own data sheet."""
    assert isinstance(ShardedPlannerProvider("size"), PlannerProvider)
    results, session = dry_run("H100", "a100")
    for sku, result in results.items():
        assert result.success, result.planner_failure_reason
        assert result.sharding_plan is not None
        assert len(result.sharding_plan.plan[""]) == len(result.sharding_options) == 6
        assert result.estimated_max_hbm_bytes > 0
        assert result.estimated_max_ddr_bytes == 0
        assert session.topology_cache[sku, 4, 4].devices[0].storage.hbm == 80 * GIB
    h100, a100 = results["H100"], results["a100"]
    assert h100.max_rank_perf is not None
    assert a100.max_rank_perf is not None
    assert h100.critical_path_ms is not None
    assert h100.max_rank_perf <= h100.critical_path_ms
    assert h100.max_rank_perf < a100.max_rank_perf
    assert session.hw_source["H100"] == "data sheet of h100_sxm"


@needs_seams
def test_times_and_memory_are_those_of_the_report() -> None:
    """They sum to our prediction of the slowest rank, and to the plan's bytes."""
    provider, built = spied(replicas=True)
    results, _ = dry_run("H100", provider=provider)
    report, result = built[0].report, results["H100"]
    assert report.details.cost is not None
    slowest_ms = max(rank.total_ms for rank in report.details.cost.per_rank)
    assert result.max_rank_perf == pytest.approx(slowest_ms)
    assert result.critical_path_ms == pytest.approx(
        report.details.cost.critical_path_ms - report.details.cost.excess_ms
    )
    assert result.estimated_max_hbm_bytes == max(report.plan.bytes_by_rank(report.task.topology))
    assert report.task.batch_size == 4 * 256


@needs_seams
def test_replicas_have_gradients_and_look_up_a_ranks_own_samples() -> None:
    def laid_out(table: Table, i: int, world_size: int) -> list[Shard]:
        if i == 0:
            return list(Replicas(world_size).shards(table))
        return [Shard(table.name, 0, (0, table.num_embeddings), (0, table.embedding_dim))]

    provider, built = spied(LaidOut(laid_out), replicas=True)
    results, _ = dry_run("H100", provider=provider)
    report, options = built[0].report, results["H100"].sharding_options
    assert results["H100"].estimated_max_hbm_bytes == max(
        report.plan.bytes_by_rank(report.task.topology)
    )
    replica, whole = options[0].shards[0], options[1].shards[0]
    assert replica.perf_total is not None
    assert whole.perf_total == pytest.approx(4 * replica.perf_total)


@needs_seams
def test_what_a_request_states_wins_over_the_data_sheet() -> None:
    overrides = {"H100": SkuOverride(hbm_gb=20.0, intra_host_bw=100.0)}
    provider, built = spied()
    _, session = dry_run(
        "H100", "A100", provider=provider, hbm_gb=40.0, per_sku_overrides=overrides
    )
    h100, a100 = (session.topology_cache[sku, 4, 4] for sku in ("H100", "A100"))
    assert h100.devices[0].storage.hbm == 20 * GIB
    assert a100.devices[0].storage.hbm == 40 * GIB
    ours = [planner.topology.intra_host_bytes_per_s for planner in built]
    assert ours == [100e9, 300e9]


@needs_seams
def test_other_names_and_the_reserve() -> None:
    provider, built = spied(gpus={"GRANDTETON": "h100"})
    config = {"storage_reservation_percentage": 0.25}
    results, session = dry_run("GRANDTETON", "UNHEARD_OF", provider=provider, config=config)
    assert all(result.success for result in results.values())
    assert session.hw_source["GRANDTETON"] == "data sheet of h100_sxm"
    assert session.hw_source["UNHEARD_OF"] == "request_caps"
    assert built[0].report.task.topology.memory_bytes == 60 * GIB
    with pytest.raises(ConfigError, match="known are"):
        ShardedPlannerProvider("size", gpus={"GRANDTETON": "h101"})


@needs_seams
def test_a_plan_that_does_not_fit_is_a_result() -> None:
    results, _ = dry_run("H100", "A100", per_sku_overrides={"H100": SkuOverride(hbm_gb=1e-6)})
    assert not results["H100"].success
    assert results["H100"].planner_error_type is PlannerErrorType.INSUFFICIENT_STORAGE
    assert "table" in str(results["H100"].planner_failure_reason)
    assert results["A100"].success


@needs_seams
def test_on_cpus_tables_are_in_host_memory() -> None:
    results, _ = dry_run("H100", compute_device="cpu", ddr_gb=1.0)
    assert results["H100"].success, results["H100"].planner_failure_reason
    assert results["H100"].estimated_max_hbm_bytes == 0
    assert results["H100"].estimated_max_ddr_bytes > 0


@needs_seams
def test_without_prices_there_are_no_times() -> None:
    provider = ShardedPlannerProvider("size", cost_model=None)
    results, _ = dry_run("H100", provider=provider)
    assert results["H100"].success
    assert results["H100"].max_rank_perf is None


@needs_seams
def test_what_cannot_be_kept_is_refused_or_named(caplog: pytest.LogCaptureFixture) -> None:
    for stated in (
        {"pod_size": 2, "local_world_size": 2},
        {"config": {"planner_variant": PlannerVariant.LINEAR_PROGRAMMING}},
    ):
        results, _ = dry_run("H100", **stated)
        assert not results["H100"].success
        name = "pod_size" if "pod_size" in stated else "planner_variant"
        assert name in str(results["H100"].planner_failure_reason)
    kept = {"dense_tensor_estimate": 1, "parameter_multiplier": 2.0}
    kept |= {"planner_variant": PlannerVariant.OSS}
    results, _ = dry_run("H100", pod_size=1, config=kept)
    assert results["H100"].success
    assert "planner_config" not in caplog.text
    chosen = {"proposer_type": "greedy", "timeout_seconds": 5, "balance_modules": True}
    results, _ = dry_run("H100", config=chosen)
    assert results["H100"].success
    assert "planner_config has proposer_type, timeout_seconds, balance_modules for" in caplog.text
    for name in ("topology", "batch_size", "global_batch_size", "constraints"):
        with pytest.raises(ConfigError, match=f"^{name} is an argument of the request"):
            ShardedPlannerProvider("size", **{name: 4})
    with pytest.raises(ConfigError, match="calibrate measures this machine"):
        ShardedPlannerProvider(calibrate=20)
    with pytest.raises(ConfigError, match="no argument 'patence'"):
        ShardedPlannerProvider(GreedySharder("size"), patence=1)
