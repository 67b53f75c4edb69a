"""Brings `ShardedPlanner` into TorchRec's own planning: its dry run and its collective planning.

From TorchRec 1.9 on, an orchestrator plans a request for one or more kinds of hardware ("SKUs").
A provider gives it the topology, the reserve of memory and the planner for each of them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Mapping
from typing import Any

from torch import nn
from torchrec.distributed.planner.types import (
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    StorageReservation,
)
from torchrec.distributed.planner.types import Topology as TorchRecTopology
from torchrec.distributed.types import ModuleSharder
from torchrec.distributed.types import ShardingPlan as TorchRecPlan

from dlrm_sharded.drop_in.chosen_options import chosen_options
from dlrm_sharded.drop_in.model_report import ModelReport
from dlrm_sharded.drop_in.sharded_planner import ShardedPlanner
from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError
from dlrm_sharded.hardware.artifact import CALIBRATED
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.gpus.gpu_specs import MOST_COMMON, GpuSpec, find_gpu_spec, named_gpu_spec
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.plans.task import Topology
from dlrm_sharded.sharders.base import Sharder

log = logging.getLogger(__name__)

OF_REQUEST = frozenset({"topology", "batch_size", "global_batch_size", "constraints"})
"""Arguments of `ShardedPlanner` that a request states."""

KEPT = (
    "planner_variant",
    "storage_reservation_policy",
    "storage_reservation_percentage",
    "parameter_multiplier",
    "dense_tensor_estimate",
)
"""Fields of TorchRec's `PlannerConfig` that have an effect; others choose its own method."""

FIGURES = ("hbm_gb", "ddr_gb", "intra_host_bw", "inter_host_bw")
"""Figures of hardware in GiB and GB/s, as a request and its overrides name them."""

MEMORY = {"cpu": "ddr", "cuda": "hbm"}
"""TorchRec's name for the memory of tables, by compute device."""


class ShardedPlannerProvider:
    """Plans with any sharder where TorchRec asks a `PlannerProvider` for its planner.

    `DefaultPlannerExecutor(ShardedPlannerProvider("neuroshard"))` is what the orchestrators of
    TorchRec 1.9 take. A SKU with the name of a GPU that has a data sheet here, such as "H100", has
    its memory, links and prices from there, unless the request states others. Every other SKU has
    the memory that the request states, or TorchRec's default, and the prices of this machine or of
    an unknown GPU.

    Args:
        sharder: a name in conf/sharder, or any sharder.
        gpus: names of GPUs by SKU, for SKUs that have other names: {"GRANDTETON": "h100"}.
        options: further arguments of `ShardedPlanner`, without those that a request states.

    Raises:
        ConfigError: TorchRec is older than 1.9, an argument is one of the request's or measures
            this machine, or a GPU is unknown.
    """

    def __init__(
        self,
        sharder: str | Sharder = "neuroshard",
        *,
        gpus: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        try:
            from torchrec.distributed.planner.provider import DefaultPlannerProvider
        except ImportError as error:
            raise ConfigError(
                "ShardedPlannerProvider needs TorchRec 1.9 or newer; with an older one, call "
                "ShardedPlanner or plan_model"
            ) from error
        if stated := OF_REQUEST & options.keys():
            raise ConfigError(f"{min(stated)} is an argument of the request; state it there")
        if options.get("calibrate") is not None:
            raise ConfigError(
                "calibrate measures this machine, and a provider plans for any; leave it out"
            )
        self._torchrec = DefaultPlannerProvider()
        self._gpus = {
            sku: named_gpu_spec(name, key=f"gpus[{sku!r}]") for sku, name in (gpus or {}).items()
        }
        ShardedPlanner(sharder, **options)  # refuses wrong arguments before TorchRec asks
        self._planner = functools.partial(ProvidedPlanner, sharder, **options)

    def build_topology(self, sku: str, request: Any, ctx: Any) -> TorchRecTopology:
        """Return TorchRec's topology of a SKU, with its memory.

        Raises:
            ConfigError: the request has pods, whose links are not planned.
        """
        if request.pod_size not in (None, 1):
            raise ConfigError(
                f"the request has pod_size={request.pod_size}, which is not planned; state the "
                "ranks of a pod as local_world_size"
            )
        figures = self._figures(sku, request)
        memory = {key: figures.get(key) for key in ("hbm_gb", "ddr_gb")}
        topology: TorchRecTopology = self._torchrec.build_topology(
            sku, dataclasses.replace(request, **memory), ctx
        )
        if spec := self._spec(sku, request):
            ctx.hw_source[sku] = f"data sheet of {spec.key}"
        return topology

    def build_storage_reservation(self, sku: str, request: Any) -> StorageReservation:
        """Return TorchRec's reserve of memory for what is not in tables."""
        return self._torchrec.build_storage_reservation(sku, request)

    def build_planner(
        self,
        sku: str,
        *,
        topology: TorchRecTopology,
        storage_reservation: StorageReservation,
        ctx: Any,
    ) -> ProvidedPlanner:
        """Return the planner of a SKU.

        Raises:
            ConfigError: the request wants another planner than TorchRec's open one.
        """
        config = ctx.request.planner_config
        if config.planner_variant.name not in ("UNSET", "OSS"):
            raise ConfigError(
                f"the request has planner_variant={config.planner_variant.name}, which is another "
                "planner; leave it out"
            )
        names = [field.name for field in dataclasses.fields(config) if field.name not in KEPT]
        plain = type(config)()
        if stated := [name for name in names if getattr(config, name) != getattr(plain, name)]:
            log.warning(
                "planner_config has %s for TorchRec's own method, without effect here; give "
                "options to ShardedPlannerProvider, such as time_budget_s",
                ", ".join(stated),
            )
        figures = self._figures(sku, ctx.request)
        links = {
            f"{link}_host_bytes_per_s": 1e9 * figures[f"{link}_host_bw"]
            for link in ("intra", "inter")
            if f"{link}_host_bw" in figures
        }
        return self._planner(
            spec=self._spec(sku, ctx.request),
            links=links,
            of_torchrec=topology,
            reservation=storage_reservation,
            ctx=ctx,
        )

    def _spec(self, sku: str, request: Any) -> GpuSpec | None:
        """Return the data sheet of a SKU; None for a CPU or without one."""
        if request.compute_device not in (None, "cuda"):
            return None
        return self._gpus.get(sku) or find_gpu_spec(MOST_COMMON.get(sku.lower(), sku))

    def _figures(self, sku: str, request: Any) -> dict[str, float]:
        """Return what is known of a SKU: its data sheet, the request, and its overrides there."""
        found: dict[str, Any] = {}
        if spec := self._spec(sku, request):
            sheet = spec.memory_gib, None, spec.link_gb_per_s, spec.adapter_gb_per_s
            found = dict(zip(FIGURES, sheet, strict=True))
        for stated in (request, (getattr(request, "per_sku_overrides", None) or {}).get(sku)):
            own = {key: getattr(stated, key, None) for key in FIGURES}
            found |= {key: value for key, value in own.items() if value is not None}
        return {key: value for key, value in found.items() if value is not None}


class ProvidedPlanner(ShardedPlanner):
    """Plans for the ranks of a request, and tells TorchRec which options the plan has chosen.

    Args:
        spec: data sheet of the ranks' GPU; None if it has none or the ranks are CPUs.
        links: bandwidths of a rank that are known, by their keys in our topology.
        reservation: takes the memory of what is not in tables off the ranks.
        ctx: TorchRec's session, with the request and the listeners that are told of the plan.
    """

    def __init__(
        self,
        sharder: str | Sharder,
        *,
        spec: GpuSpec | None,
        links: Mapping[str, Any],
        of_torchrec: TorchRecTopology,
        reservation: StorageReservation,
        ctx: Any,
        **options: Any,
    ) -> None:
        request = ctx.request
        self._spec, self._links, self._of_torchrec = spec, links, of_torchrec
        self._reservation, self._listeners = reservation, ctx.stats or ()
        self._stated = {"batch_size": request.batch_size, "constraints": request.constraints}
        self._chosen: list[ShardingOption] = []
        super().__init__(sharder, topology=_ranks(of_torchrec, links), **self._stated, **options)

    def get_selected_options(self) -> list[ShardingOption]:
        """Return the options of the last plan; none on ranks that have not planned."""
        return self._chosen

    def get_search_space(self) -> None:
        """Return None, as no options are listed before the search."""
        return None

    def _plan(
        self,
        model: nn.Module,
        sharders: list[ModuleSharder[Any]],
        topology: Topology,
        context: RunContext | None,
    ) -> tuple[TorchRecPlan, ModelReport]:
        started_s = time.perf_counter()
        self._chosen = []
        stated = {**self._stated, "topology": self._of_torchrec, "sharders": sharders}
        topology = _ranks(self._reservation.reserve(module=model, **stated), self._links)
        try:
            plan, report = super()._plan(model, sharders, topology, context)
        except InfeasibleTaskError as error:
            # Without a cause, which would be sent to the other ranks in its place.
            raise PlannerError(str(error), PlannerErrorType.INSUFFICIENT_STORAGE) from None
        self._chosen = chosen_options(model, sharders, plan, report)
        for listener in self._listeners if report.details.cost else ():  # they need times
            listener.log(
                sharding_plan=plan,
                storage_reservation=self._reservation,
                num_proposals=1,
                num_plans=1,
                run_time=time.perf_counter() - started_s,
                best_plan=self._chosen,
                debug=False,
                **stated,
            )
        return plan, report

    def _context(
        self, detected: RunContext | None, topology: Topology, optimizer: str | None
    ) -> RunContext:
        found, spec = super()._context(detected, topology, optimizer), self._spec
        if spec is None or (found.hardware is not None and found.hardware.name in spec.names):
            return found
        gpu, ranks = Hardware(spec.device_name), topology.ranks_per_host
        return RunContext("cuda", gpu, optimizer, ranks, calibrated=CALIBRATED)


def _ranks(of_torchrec: TorchRecTopology, links: Mapping[str, Any]) -> Topology:
    """Return the ranks of TorchRec's topology, with the memory that it leaves for tables.

    TorchRec's own bandwidths are constants, and do not count.
    """
    device = of_torchrec.compute_device
    memory = [max(1, getattr(rank.storage, MEMORY[device])) for rank in of_torchrec.devices]
    return Topology(
        world_size=of_torchrec.world_size,
        memory_bytes=max(memory),
        memory_bytes_by_rank=tuple(memory),
        local_world_size=of_torchrec.local_world_size,
        compute_device=device,
        **links,
    )
