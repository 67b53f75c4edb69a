"""Fits the calibrated cost model's two halves to measured plans.

Letters: G lookups of all samples' ranks, S their shards, K work terms, C numbers of a profile,
J cache levels.
"""

from __future__ import annotations

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
    CommunicationModel,
    Hosts,
    exchange_terms,
    reduce_terms,
)
from dlrm_sharded.cost.compute import DIRECTIONS, ComputeModel, PriceNet
from dlrm_sharded.cost.features import Floats, Workload

HIDDEN = 16
NUM_LOOKUPS = 3
LEAST_SHARE = 0.01
"""Of the mean time, that a term's first price makes up which constant prices alone do not need:
small, but not out of reach."""

REGULARITY = 1e-4
CACHE_LEVELS = 3
FIRST_CACHE_MB, LAST_CACHE_MB = 0.3, 100.0
HUBER_DELTA = 0.1
"""Relative error from which on a sample counts linearly: a disturbance does not bend the fit."""

MAX_LEARNING_RATE = 0.01
ROUNDS = 20
LEAST_ERROR = 0.02
LEAST_TIME_MS = 1e-4
"""What the clock can tell from nothing."""


@dataclass(frozen=True, slots=True)
class LookupData:
    """Measured ranks, with their shards in one array after the other.

    Args:
        work, profile, read_mb: [S, K], [S, C], [S].
        lookup: [S], which of the ranks' lookups: `NUM_LOOKUPS` times the rank, plus its kind.
        times_ms: [ranks, 2], forward and backward.
    """

    work: Floats
    profile: Floats
    read_mb: Floats
    lookup: NDArray[np.int64]
    times_ms: Floats

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> LookupData:
        """All ranks of the samples that have a shard, and times that the clock tells from 0."""
        shards: dict[str, list[Floats]] = {"work": [], "profile": [], "read_mb": []}
        lookup: list[NDArray[np.int64]] = []
        times: list[tuple[float, float]] = []
        for sample in samples:
            workload = workload_of_sample(sample)
            of_sample = {
                "work": workload.work(),
                "profile": workload.profile(),
                "read_mb": workload.unique_bytes() / 1e6,
            }
            for rank, stages in enumerate(sample.cost.per_rank):
                on_rank = workload.rank == rank
                of_rank = (stages.fwd_compute_ms, stages.bwd_compute_ms)
                if not on_rank.any() or min(of_rank) == 0.0:
                    continue
                for key, values in of_sample.items():
                    shards[key].append(values[on_rank])
                lookup.append(NUM_LOOKUPS * len(times) + workload.module[on_rank])
                times.append(of_rank)
        return cls(
            **{key: np.concatenate(values) for key, values in shards.items()},
            lookup=np.concatenate(lookup),
            times_ms=np.array(times),
        )


class _PriceNet(nn.Module):
    """`PriceNet`, to be trained: what must not be negative is kept so by softplus or exp."""

    def __init__(self, num_profile: int, first_prices: Floats, first_launch_ms: float) -> None:
        super().__init__()
        num_terms = len(first_prices)
        self.net = nn.Sequential(
            nn.Linear(num_profile, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, num_terms)
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
        launch = torch.tensor(first_launch_ms).log()
        self.log_launches = nn.Parameter(launch - torch.tensor([0.0, 1.0]))

    def forward(
        self, work: Tensor, profile: Tensor, read_mb: Tensor, lookup: Tensor, num_ranks: int
    ) -> Tensor:
        """[ranks], in ms."""
        rank = lookup // NUM_LOOKUPS
        priced = self.net(profile).exp() * work
        sums = torch.zeros(num_ranks, priced.shape[1]).index_add(0, rank, priced)
        read = torch.zeros(num_ranks).index_add(0, rank, read_mb)
        launched = torch.zeros(num_ranks, NUM_LOOKUPS).view(-1).index_fill(0, lookup, 1.0)
        num_next = launched.view(num_ranks, NUM_LOOKUPS).sum(dim=1) - 1.0
        level = (torch.log10(read + 1e-3)[:, None] - self.cache_mb) * self.log_slope.exp()
        gained = sums @ nn.functional.softplus(self.raw_gain)
        times = sums.sum(dim=1) + (torch.sigmoid(level) * gained).sum(dim=1)
        first, following = self.log_launches.exp()
        return times + first + following * num_next

    def irregularity(self) -> Tensor:
        """How far prices are from depending on nothing."""
        last = self.net[-1]
        assert isinstance(last, nn.Linear)
        return last.weight.square().mean()

    def frozen(self) -> PriceNet:
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
    """Prices of both directions, by Adam on the relative error of all samples at once.

    It starts from the constant prices that fit best.
    """
    mean, std = data.profile.mean(axis=0), data.profile.std(axis=0) + 1e-3
    inputs = (
        torch.tensor(data.work, dtype=torch.float32),
        torch.tensor((data.profile - mean) / std, dtype=torch.float32),
        torch.tensor(data.read_mb, dtype=torch.float32),
        torch.tensor(data.lookup),
    )
    of_rank = np.zeros((len(data.times_ms), data.work.shape[1] + 1))
    np.add.at(of_rank[:, :-1], data.lookup // NUM_LOOKUPS, data.work)
    of_rank[:, -1] = 1.0
    nets = []
    for i in range(len(DIRECTIONS)):
        times_of = data.times_ms[:, i]
        times = torch.tensor(times_of, dtype=torch.float32)
        constant = fit_nonnegative(of_rank, times_of)
        least = LEAST_SHARE * times_of.mean() / np.maximum(of_rank[:, :-1].mean(axis=0), 1e-9)
        first_prices = np.where(constant[:-1] > 0, constant[:-1], least)
        first_launch_ms = max(float(constant[-1]), LEAST_SHARE * float(times_of.mean()))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + i)
            net = _PriceNet(data.profile.shape[1], first_prices, first_launch_ms)
        optimizer = torch.optim.Adam(net.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, MAX_LEARNING_RATE, total_steps=num_steps
        )
        for _ in range(num_steps):
            optimizer.zero_grad()
            error = torch.log(net(*inputs, len(times)) / times)
            loss = nn.functional.huber_loss(error, torch.zeros_like(error), delta=HUBER_DELTA)
            loss = loss + REGULARITY * net.irregularity()
            loss.backward()
            optimizer.step()
            schedule.step()
        nets.append(net.frozen())
    return ComputeModel(
        profile_mean=mean,
        profile_std=std,
        profile_low=data.profile.min(axis=0),
        profile_high=data.profile.max(axis=0),
        forward=nets[0],
        backward=nets[1],
    )


def fit_communication(
    workloads: Sequence[Workload], times_ms: Sequence[Floats], hosts: Sequence[Hosts]
) -> CommunicationModel:
    """Weights that are not negative, by least squares on the relative error.

    Args:
        times_ms: of each workload, [3, W] in the order of `EXCHANGES`.
    """
    exchange, reduce = [], []
    for i, kind in enumerate(EXCHANGES):
        rows, times = [], []
        for workload, of_kind, where in zip(workloads, times_ms, hosts, strict=True):
            rows.append(communication_rows(workload, kind, where))
            times.append(of_kind[i])
        weights = fit_nonnegative(np.concatenate(rows), np.concatenate(times))
        num_reduce = reduce_terms(np.zeros(1), np.zeros(1), hosts[0]).shape[1]
        exchange.append(weights[:-num_reduce])
        reduce.append(weights[-num_reduce:])
    return CommunicationModel(np.array(exchange), np.array(reduce))


def communication_rows(workload: Workload, kind: str, hosts: Hosts) -> Floats:
    """[W, F + F'], the terms of all-to-all and reduce-scatter that a rank's time consists of."""
    exchange = workload.exchange(of_ids=kind == "input_dist")
    volume, num_shards = exchange.volume[None], exchange.num_shards[None]
    terms = exchange_terms(volume, num_shards, hosts, sends_own=kind == "fwd_comm")
    there = num_shards.sum() > 0
    columns = [np.broadcast_to(term * there, volume.shape)[0] for term in terms]
    none = np.zeros(hosts.world_size)
    reduced = reduce_terms(none, none, hosts)
    for reduce in exchange.reduces:
        group = hosts.group(reduce.group_size)
        reduced += reduce_terms(reduce.volume, reduce.num_shards, group)
    return np.column_stack([*columns, reduced])


def fit_nonnegative(terms: Floats, times_ms: Floats) -> Floats:
    """[F], weights >= 0 of the terms [N, F], for the least mean absolute relative error.

    Least squares, repeated with every time weighted by its error before, so that a disturbance
    counts no more than it is large; relative to the geometric mean of both times, so that the fit
    is not drawn to small ones. Times of 0 have no relative error, and are left out.
    """
    terms, times_ms = terms[times_ms > 0], times_ms[times_ms > 0]
    scale = 1.0 / times_ms
    weights: Floats = np.zeros(terms.shape[1])
    for _ in range(ROUNDS):
        weights, _ = nnls(terms * scale[:, None], times_ms * scale)
        predicted = np.maximum(terms @ weights, LEAST_TIME_MS)
        mean = np.sqrt(times_ms * predicted)
        error = np.abs(predicted - times_ms) / mean
        scale = 1.0 / (mean * np.sqrt(np.maximum(error, LEAST_ERROR)))
    return weights
