"""Redistributes ids without waiting for their numbers, if every sample has the same number.

In TorchRec, ranks first send each other the numbers of ids that follow. The host waits for these
numbers, and for the lengths of what has arrived, because both are on the device. If they are known
beforehand, each rank sends its ids at once, and looks them up without waiting. Ids of row blocks go
to the ranks of their rows; their numbers vary, so TorchRec redistributes them.

Letters: W ranks, b samples of a rank, N_f ids of feature f in a sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.dist_data import KJTAllToAllTensorsAwaitable
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.sharding.tw_sharding import TwSparseFeaturesDist
from torchrec.distributed.types import Awaitable, NoWait, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class FixedLengthSharder(EmbeddingBagCollectionSharder):
    """Shards collections whose features have a fixed number of ids in each sample.

    Args:
        ids_per_sample: N_f by name of the feature.
    """

    def __init__(self, ids_per_sample: Mapping[str, int], **options: Any) -> None:
        super().__init__(**options)
        self._ids_per_sample = ids_per_sample

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingBagCollection:
        sharded = _Collection(
            module=module,
            table_name_to_parameter_sharding=params,
            env=env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )
        sharded.ids_per_sample = self._ids_per_sample
        return sharded


class _Collection(ShardedEmbeddingBagCollection):
    ids_per_sample: Mapping[str, int]

    def _create_input_dist(self, input_feature_names: list[str]) -> None:
        super()._create_input_dist(input_feature_names)
        for place, sharding in enumerate(self._embedding_shardings):
            by_torchrec = self._input_dists[place]
            if type(by_torchrec) is TwSparseFeaturesDist:  # whole tables and column shards
                names = sharding.feature_names()
                self._input_dists[place] = _Exchange(
                    by_torchrec._dist._pg,
                    by_torchrec._dist._splits,
                    names,
                    [self.ids_per_sample[name] for name in names],
                )


class _Exchange(nn.Module):
    """Sends the ids of each feature to the rank that has its table.

    Args:
        num_features: number of features of each rank, in the order of `names`.
        ids_per_sample: N_f in the order of `names`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_features: Sequence[int],
        names: Sequence[str],
        ids_per_sample: Sequence[int],
    ) -> None:
        super().__init__()
        self.group = group
        ends = [0, *itertools.accumulate(num_features)]
        parts = [slice(*ends_of_rank) for ends_of_rank in itertools.pairwise(ends)]
        self.sent = [sum(ids_per_sample[part]) for part in parts]
        own = parts[group.rank()]
        self.names, self.ids_per_sample = list(names[own]), list(ids_per_sample[own])
        self._known: dict[int, _Known] = {}

    def forward(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Begin to send [sum of b * N_f] ids of this rank's samples."""
        num_samples = features.stride()
        if num_samples not in self._known:
            self._known[num_samples] = _Known.of(self, num_samples, features.device())
        with torch.no_grad():
            return NoWait(_SentIds(self, self._known[num_samples], features.values()))


@dataclass(frozen=True, slots=True)
class _Known:
    """Sizes and offsets of the ids that a rank receives for batches of b samples.

    Args:
        sizes: number of ids that arrive from each rank, by feature: b * N_f.
        lengths: [number of features * W * b] N_f.
        offsets: where the ids of each sample begin, and the end.
    """

    num_samples: int
    sizes: list[int]
    lengths: Tensor
    offsets: Tensor
    offset_per_key: list[int]

    @classmethod
    def of(cls, exchange: _Exchange, num_samples: int, device: torch.device) -> _Known:
        num_of_all = num_samples * exchange.group.size()
        per_sample = torch.tensor(exchange.ids_per_sample, dtype=torch.int32)
        lengths = per_sample.repeat_interleave(num_of_all)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        return cls(
            num_samples,
            [num_samples * count for count in exchange.ids_per_sample],
            lengths.to(device),
            offsets.to(device),
            [0, *itertools.accumulate(num_of_all * count for count in exchange.ids_per_sample)],
        )


class _SentIds(KJTAllToAllTensorsAwaitable):
    """Ids on their way to the ranks of their tables.

    TorchRec reads each rank's number of samples from its own class, to exchange the vectors.
    """

    def __init__(self, exchange: _Exchange, known: _Known, ids: Tensor) -> None:
        Awaitable.__init__(self)
        self._exchange, self._known, self._ids = exchange, known, ids
        self._workers = exchange.group.size()
        self._stride_per_rank = [known.num_samples] * self._workers
        self._arrived, self._work = ids, None
        if self._workers > 1:
            received = [sum(known.sizes)] * self._workers
            self._arrived = ids.new_empty(sum(received))
            self._work = dist.all_to_all_single(
                self._arrived,
                ids,
                received,
                [known.num_samples * count for count in exchange.sent],
                group=exchange.group,
                async_op=True,
            )

    def _wait_impl(self) -> KeyedJaggedTensor:
        """Return [sum over f of W * b * N_f] ids, ordered by feature, then by rank."""
        ids, known = self._arrived, self._known
        if self._work is not None:
            self._work.wait()
            num_features = len(known.sizes)
            if num_features > 1:
                pieces = ids.split(known.sizes * self._workers)
                ids = torch.cat([p for i in range(num_features) for p in pieces[i::num_features]])
        ends = known.offset_per_key
        return KeyedJaggedTensor(
            self._exchange.names,
            ids,
            lengths=known.lengths,
            offsets=known.offsets,
            stride=known.num_samples * self._workers,
            length_per_key=[end - begin for begin, end in itertools.pairwise(ends)],
            offset_per_key=ends,
        )
