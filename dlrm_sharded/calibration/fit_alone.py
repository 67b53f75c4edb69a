"""Fits computation and communication of the calibrated cost model to measured plans.

Letters: N measured ranks, S their shards, K work terms, Q terms of the widest shard, C numbers of a
profile, W ranks of a plan, F terms of an all-to-all, F' those of a reduction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from torch import Tensor, nn

from dlrm_sharded.calibration.samples import Sample, workload_of_sample
from dlrm_sharded.cost.communication import (
    EXCHANGES,
    HARDLY_ANY,
    REDUCE_TERMS,
    CommunicationModel,
    Hosts,
    all_reduce_terms,
    exchange_terms,
    reduce_terms,
)
from dlrm_sharded.cost.compute import (
    ComputeModel,
    DensePrices,
    PriceNet,
    dense_terms,
)
from dlrm_sharded.cost.features import CPU_WORK, DeviceWork, profile_of, work_of
from dlrm_sharded.cost.sequences import SequencePrices
from dlrm_sharded.cost.widest import widest_terms, width_vectors
from dlrm_sharded.cost.workload import Floats, Workload
from dlrm_sharded.plans.plan_cost import BWD_COMM, DIRECTIONS, FWD_COMM, INPUT_DIST

HIDDEN_WIDTH = 16
"""Width of the price nets' hidden layer."""

NUM_LOOKUPS = 6
"""Largest number of fused lookups on a rank, one for each kind of layout of bags and sequences."""

MIN_FIRST_SHARE = 0.01
"""Fraction of the mean time from which a term's price starts if the best constant price is zero."""

PRICE_DECAY = 1e-4
"""Weight of the penalty on prices that depend on the access profile."""

CACHE_LEVELS = 3
FIRST_CACHE_MB, LAST_CACHE_MB = 0.3, 100.0
"""Range of cache sizes from which the fit starts."""

HUBER_DELTA = 0.1
"""Relative error above which the loss is linear, because such a measurement may be an outlier."""

MAX_LEARNING_RATE = 0.01

NUM_REWEIGHTINGS = 20
MIN_RELATIVE_ERROR = 0.02
"""Rounds of reweighted least squares, and the error below which a weight does not grow further."""

MIN_TIME_MS = 1e-4
"""Smallest time that the clock can tell from zero."""


@dataclass(frozen=True, slots=True)
class LookupData:
    """The shards of all measured ranks, packed, and the times of the ranks.

    Args:
        work, profile, read_mb: [S, K], [S, C] and [S], see `Workload`.
        lookup: [S], index of the fused lookup: `NUM_LOOKUPS` times the rank, plus its kind.
        widest: [N, Q], `widest.WIDEST_TERMS`; none on devices without warps.
        times_ms: [N, 2], forward and backward.
        device: the work of the device that was measured.
    """

    work: Floats
    profile: Floats
    read_mb: Floats
    lookup: NDArray[np.int64]
    widest: Floats
    times_ms: Floats
    device: DeviceWork

    @classmethod
    def from_samples(cls, samples: Sequence[Sample], device: DeviceWork = CPU_WORK) -> LookupData:
        """Pack the ranks of the samples that have a shard and times above zero."""
        shards: dict[str, list[Floats]] = {"work": [], "profile": [], "read_mb": []}
        lookup: list[NDArray[np.int64]] = []
        widest: list[Floats] = []
        times: list[tuple[float, float]] = []
        for sample in samples:
            workload = workload_of_sample(sample)
            columns = {
                "work": work_of(workload, device),
                "profile": profile_of(workload),
                "read_mb": workload.unique_bytes() / 1e6,
            }
            sums = workload.by_rank(width_vectors(workload))
            widest_of_rank = widest_terms(sums, sums)
            for rank, stages in enumerate(sample.cost.per_rank):
                on_rank = workload.rank == rank
                directions_ms = (stages.fwd_compute_ms, stages.bwd_compute_ms)
                if not on_rank.any() or min(directions_ms) == 0.0:
                    continue
                for key, values in columns.items():
                    shards[key].append(values[on_rank])
                lookup.append(NUM_LOOKUPS * len(times) + workload.module[on_rank])
                widest.append(widest_of_rank[rank])
                times.append(directions_ms)
        return cls(
            **{key: np.concatenate(values) for key, values in shards.items()},
            lookup=np.concatenate(lookup),
            widest=np.array(widest) if device.has_warps else np.zeros((len(times), 0)),
            times_ms=np.array(times),
            device=device,
        )


class TrainablePriceNet(nn.Module):
    """A `PriceNet` in torch; softplus and exp keep positive what must not be negative.

    tests/unit/cost/test_learned.py checks that both compute the same times.
    """

    def __init__(
        self,
        num_profile: int,
        first_prices: Floats,
        first_widest_ms: Floats,
        first_launch_ms: float,
    ) -> None:
        super().__init__()
        num_terms = len(first_prices)
        self.net = nn.Sequential(
            nn.Linear(num_profile, HIDDEN_WIDTH), nn.Tanh(), nn.Linear(HIDDEN_WIDTH, num_terms)
        )
        last = self.net[-1]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            last.weight.mul_(0.1)
            last.bias.copy_(torch.tensor(first_prices).log())
        self.raw_gain = nn.Parameter(torch.full((num_terms, CACHE_LEVELS), -3.0))
        edges = torch.tensor([FIRST_CACHE_MB, LAST_CACHE_MB]).log10().tolist()
        self.cache_mb = nn.Parameter(torch.linspace(edges[0], edges[1], CACHE_LEVELS))
        self.log_slope = nn.Parameter(torch.full((CACHE_LEVELS,), 1.0))
        self.log_widest = nn.Parameter(torch.tensor(first_widest_ms, dtype=torch.float32).log())
        launch = torch.tensor(first_launch_ms).log()
        self.log_launches = nn.Parameter(launch - torch.tensor([0.0, 1.0]))

    def forward(
        self, work: Tensor, profile: Tensor, read_mb: Tensor, lookup: Tensor, widest: Tensor
    ) -> Tensor:
        """Return [N], times of one direction in ms; the shards are packed as in `LookupData`."""
        num_ranks, rank = len(widest), lookup // NUM_LOOKUPS
        priced = self.net(profile).exp() * work
        sums = torch.zeros(num_ranks, priced.shape[1]).index_add(0, rank, priced)
        read = torch.zeros(num_ranks).index_add(0, rank, read_mb)
        # a rank launches every lookup that has a shard; the first has a price of its own
        launched = torch.zeros(num_ranks, NUM_LOOKUPS).view(-1).index_fill(0, lookup, 1.0)
        num_next = launched.view(num_ranks, NUM_LOOKUPS).sum(dim=1) - 1.0
        level = (torch.log10(read + 1e-3)[:, None] - self.cache_mb) * self.log_slope.exp()
        gained = sums @ nn.functional.softplus(self.raw_gain)
        times = sums.sum(dim=1) + (torch.sigmoid(level) * gained).sum(dim=1)
        first, following = self.log_launches.exp()
        times = times + first + following * num_next
        return times + widest @ self.log_widest.exp() if len(self.log_widest) else times

    def profile_dependence(self) -> Tensor:
        """Return [], which is zero if no price depends on the access profile."""
        last = self.net[-1]
        assert isinstance(last, nn.Linear)
        return last.weight.square().mean()

    def to_numpy(self) -> PriceNet:
        """Return the net with its present parameters as arrays."""

        def array(tensor: Tensor) -> Floats:
            values: Floats = tensor.detach().double().numpy().copy()
            return values

        layers = [layer for layer in self.net if isinstance(layer, nn.Linear)]
        return PriceNet(
            weights=tuple(array(layer.weight.T) for layer in layers),
            biases=tuple(array(layer.bias) for layer in layers),
            cache_gain=array(nn.functional.softplus(self.raw_gain)),
            cache_mb=array(self.cache_mb),
            cache_slope=array(self.log_slope.exp()),
            launch_ms=float(self.log_launches.detach()[0].exp()),
            next_launch_ms=float(self.log_launches.detach()[1].exp()),
        )


def fit_compute(data: LookupData, *, seed: int, num_steps: int) -> ComputeModel:
    """Fit the prices of both directions by Adam on the relative error of all samples at once.

    The fit starts from the best constant prices.
    """
    mean, std = data.profile.mean(axis=0), data.profile.std(axis=0) + 1e-3
    inputs = (
        torch.tensor(data.work, dtype=torch.float32),
        torch.tensor((data.profile - mean) / std, dtype=torch.float32),
        torch.tensor(data.read_mb, dtype=torch.float32),
        torch.tensor(data.lookup),
        torch.tensor(data.widest, dtype=torch.float32),
    )
    num_work = data.work.shape[1]
    work = np.zeros((len(data.times_ms), num_work))
    np.add.at(work, data.lookup // NUM_LOOKUPS, data.work)
    # [N, K + Q + 1], factors of constant prices: the work of each rank, and one launch
    terms = np.column_stack([work, data.widest, np.ones(len(work))])
    nets, widest_ms = [], []
    for i in range(len(DIRECTIONS)):
        times_ms = data.times_ms[:, i]
        times = torch.tensor(times_ms, dtype=torch.float32)
        constant = fit_nonnegative(terms, times_ms)
        # prices are exponentials: one that started at zero would stay there
        min_time_ms = MIN_FIRST_SHARE * times_ms.mean()
        min_prices = min_time_ms / np.maximum(terms[:, :-1].mean(axis=0), 1e-9)
        first_prices = np.where(constant[:-1] > 0, constant[:-1], min_prices)
        first_launch_ms = max(float(constant[-1]), float(min_time_ms))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + i)
            net = TrainablePriceNet(
                data.profile.shape[1],
                first_prices[:num_work],
                first_prices[num_work:],
                first_launch_ms,
            )
        optimizer = torch.optim.Adam(net.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, MAX_LEARNING_RATE, total_steps=num_steps
        )
        for _ in range(num_steps):
            optimizer.zero_grad()
            error = torch.log(net(*inputs) / times)
            loss = nn.functional.huber_loss(error, torch.zeros_like(error), delta=HUBER_DELTA)
            loss = loss + PRICE_DECAY * net.profile_dependence()
            loss.backward()
            optimizer.step()
            schedule.step()
        nets.append(net.to_numpy())
        widest_ms.append(net.log_widest.detach().double().exp().numpy().copy())
    return ComputeModel(
        profile_mean=mean,
        profile_std=std,
        profile_low=data.profile.min(axis=0),
        profile_high=data.profile.max(axis=0),
        forward=nets[0],
        backward=nets[1],
        device=data.device,
        widest_ms=np.array(widest_ms) if data.device.has_warps else None,
    )


def fit_communication(
    workloads: Sequence[Workload], times_ms: Sequence[Floats], hosts: Sequence[Hosts]
) -> CommunicationModel:
    """Fit the weights of both kinds of terms by `fit_nonnegative`, for each of `EXCHANGES`.

    Args:
        times_ms: [3, W] for each workload, in the order of `EXCHANGES`.
        hosts: hosts of each workload's ranks.
    """
    exchange, reduce, all_reduce = [], [], None
    for i, kind in enumerate(EXCHANGES):
        rows, times = [], []
        for workload, exchanges_ms, ranks in zip(workloads, times_ms, hosts, strict=True):
            rows.append(communication_rows(workload, kind, ranks))
            times.append(exchanges_ms[i])
        weights = fit_nonnegative(np.concatenate(rows), np.concatenate(times))
        num_reduce = len(REDUCE_TERMS)
        if kind == BWD_COMM and any(workload.is_replica.any() for workload in workloads):
            all_reduce = weights[-num_reduce:]
        exchange.append(weights[: -2 * num_reduce])
        reduce.append(weights[-2 * num_reduce : -num_reduce])
    return CommunicationModel(np.array(exchange), np.array(reduce), all_reduce)


def communication_rows(workload: Workload, kind: str, hosts: Hosts) -> Floats:
    """Return [W, F + 2 F'], terms of each rank's part in one of `EXCHANGES`.

    They are those of the all-to-all, of reductions, and of the all-reduce of gradients.
    """
    exchange = workload.exchange(for_ids=kind == INPUT_DIST)
    volume, num_shards = exchange.volume[None], exchange.num_shards[None]
    terms = exchange_terms(volume, num_shards, hosts, sends_own=kind == FWD_COMM)
    is_run = num_shards.sum() > 0  # without shards there is no all-to-all, and no latency
    columns = [np.broadcast_to(term * is_run, volume.shape)[0] for term in terms]
    zeros = np.zeros(hosts.world_size)
    if exchange.num_launches > 1:  # each module has a launch
        empty = exchange_terms(zeros[None], zeros[None] + HARDLY_ANY, hosts, sends_own=False)
        more = exchange.num_launches - 1
        columns = [col + more * term[0] for col, term in zip(columns, empty, strict=True)]
    reduced = reduce_terms(zeros, zeros, hosts)
    for reduce in exchange.reduces:
        group = hosts.group(reduce.group_size)
        reduced += reduce_terms(reduce.volume, reduce.num_shards, group)
        if reduce.num_launches is not None:
            following = np.maximum(reduce.num_launches - 1, 0)[:, None]
            reduced += following * reduce_terms(zeros, zeros + HARDLY_ANY, group)
    gradient_bytes = exchange.replica_bytes * (kind == BWD_COMM)
    gradients = all_reduce_terms(np.full(hosts.world_size, gradient_bytes), hosts)
    return np.column_stack([*columns, reduced, gradients])


def fit_dense_gradients(
    compute: ComputeModel, workloads: Sequence[Workload], times_ms: Sequence[Floats]
) -> ComputeModel:
    """Return the model with the prices of dense gradients that fit plans with replicas.

    Args:
        times_ms: [W] for each workload, of its backward computation.
    """
    without = dataclasses.replace(compute, dense=DensePrices())
    terms = [workload.by_rank(dense_terms(workload)) for workload in workloads]
    return dataclasses.replace(
        compute, dense=DensePrices(*_fitted_to_rest(without, workloads, times_ms, terms))
    )


def fit_sequences(
    compute: ComputeModel, workloads: Sequence[Workload], times_ms: Sequence[Floats]
) -> ComputeModel:
    """Return the model with the prices of sequences that fit plans with some.

    Args:
        times_ms: [W] for each workload, of its backward computation.
    """
    without = dataclasses.replace(compute, sequences=SequencePrices())
    terms = [without.sequences.terms(workload) for workload in workloads]
    return dataclasses.replace(
        compute, sequences=SequencePrices(*_fitted_to_rest(without, workloads, times_ms, terms))
    )


def _fitted_to_rest(
    without: ComputeModel,
    workloads: Sequence[Workload],
    times_ms: Sequence[Floats],
    terms: Sequence[Floats],
) -> list[float]:
    """Return the weights of terms that explain what a model leaves of backward times.

    Args:
        without: the model without a price of the terms.
        times_ms: [W] for each workload.
        terms: [W, F] for each workload.
    """
    left_ms = [
        measured_ms - without.parts_ms(workload)[1].sum(axis=1)
        for workload, measured_ms in zip(workloads, times_ms, strict=True)
    ]
    # The rest of a plan may take less than is predicted; such plans say nothing of the terms.
    weights: list[float] = fit_nonnegative(np.concatenate(terms), np.concatenate(left_ms)).tolist()
    return weights


def fit_nonnegative(terms: Floats, times_ms: Floats) -> Floats:
    """Return [F], weights >= 0 of terms [N, F] with the least mean absolute relative error.

    Iteratively reweighted least squares turn squared into absolute errors, so that an outlier
    counts in proportion to its size. Errors are relative to the geometric mean of predicted and
    measured time, so that the fit does not prefer small predictions. Times of zero are left out.
    """
    terms, times_ms = terms[times_ms > 0], times_ms[times_ms > 0]
    scale = 1.0 / times_ms
    weights: Floats = np.zeros(terms.shape[1])
    for _ in range(NUM_REWEIGHTINGS):
        weights, _ = nnls(terms * scale[:, None], times_ms * scale)
        predicted = np.maximum(terms @ weights, MIN_TIME_MS)
        mean = np.sqrt(times_ms * predicted)
        error = np.abs(predicted - times_ms) / mean
        scale = 1.0 / (mean * np.sqrt(np.maximum(error, MIN_RELATIVE_ERROR)))
    return weights
