from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, embedding_bag

from dlrm_sharded.datasets.planted_labels import PlantedLabels
from dlrm_sharded.datasets.presets import embedding_demo
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.plans.tables import Table

TABLES = (Table("mid", 2_000, 4, 3.0), Table("huge", 10**7, 4, 1.5), Table("tiny", 3, 4, 1.0))


def auroc(scores: Tensor, labels: Tensor) -> float:
    rank = scores.argsort().argsort().double()
    ones = labels.sum().item()
    zeros = labels.numel() - ones
    return float((rank[labels == 1].sum() - ones * (ones - 1) / 2) / (ones * zeros))


@pytest.mark.parametrize("tables", [TABLES, embedding_demo()], ids=["three", "demo"])
def test_labels_follow_their_logits(tables: tuple[Table, ...]) -> None:
    data = SyntheticDataset(tables, batch_size=4_000, num_train_batches=1, num_val_batches=0)
    batch = data.batch("train", 0, rank=0, world_size=1)
    logits = PlantedLabels(tables, num_dense=13, seed=0).logits(
        batch.dense_features, batch.sparse_features
    )
    assert batch.labels.mean().item() == pytest.approx(
        torch.sigmoid(logits).mean().item(), abs=0.03
    )
    assert 0.1 < batch.labels.mean() < 0.6
    assert auroc(logits, batch.labels) > 0.8


def test_tables_with_learnable_ids_carry_the_signal() -> None:
    labels = PlantedLabels(TABLES, num_dense=2, seed=0, num_signal_tables=2)
    assert labels.signal_tables == ("mid", "tiny")


def test_a_linear_model_learns_them_from_ids_and_dense_features() -> None:
    data = SyntheticDataset(TABLES, batch_size=512, num_train_batches=150, num_val_batches=8)
    weights = [torch.zeros(table.num_embeddings, 1) for table in (TABLES[0], TABLES[2])]
    dense_weights = torch.zeros(13)
    for parameter in (*weights, dense_weights):
        parameter.requires_grad_()
    optimizer = torch.optim.Adagrad([*weights, dense_weights], lr=0.3)

    def scores(split: str, index: int, *, dense: bool = True) -> tuple[Tensor, Tensor]:
        batch = data.batch(split, index, rank=0, world_size=1)  # type: ignore[arg-type]
        total = batch.dense_features @ dense_weights if dense else torch.zeros(512)
        jagged = batch.sparse_features.to_dict()
        for name, weight in zip(("mid", "tiny"), weights, strict=True):
            bags = jagged[name].offsets()[:-1].long()
            total = total + embedding_bag(jagged[name].values(), weight, bags, mode="sum")[:, 0]
        return total, batch.labels

    for step in range(150):
        logits, labels = scores("train", step)
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(logits - 1.0, labels).backward()
        optimizer.step()
    with torch.no_grad():
        parts = [scores("val", i) for i in range(8)]
        ids_only = [scores("val", i, dense=False) for i in range(8)]
    labels = torch.cat([label for _, label in parts])
    assert auroc(torch.cat([score for score, _ in parts]), labels) > 0.75
    assert auroc(torch.cat([score for score, _ in ids_only]), labels) > 0.6
