from __future__ import annotations

import pytest
import torch
from scipy.stats import mannwhitneyu
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, embedding_bag

from dlrm_sharded.datasets.planted_labels import PlantedLabels
from dlrm_sharded.datasets.presets import embedding_demo
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.plans.tables import Table

TABLES = (Table("mid", 2_000, 4, 3.0), Table("huge", 10**7, 4, 1.5), Table("tiny", 3, 4, 1.0))


def auroc(scores: Tensor, labels: Tensor) -> float:
    positive, negative = scores[labels == 1], scores[labels == 0]
    return mannwhitneyu(positive, negative).statistic / (len(positive) * len(negative))


@pytest.mark.parametrize("tables", [TABLES, embedding_demo()], ids=["three", "demo"])
def test_labels_follow_their_logits(tables):
    data = SyntheticDataset(tables, batch_size=4_000, num_train_batches=1, num_val_batches=0)
    batch = data.batch("train", 0, rank=0, world_size=1)
    planted = PlantedLabels(tables, num_dense=13, seed=0)
    logits = planted.logits(batch.dense_features, batch.sparse_features)
    assert float(batch.labels.mean()) == pytest.approx(float(logits.sigmoid().mean()), abs=0.03)
    assert 0.1 < batch.labels.mean() < 0.6
    assert auroc(logits, batch.labels) > 0.8


def test_tables_with_learnable_ids_carry_the_signal():
    labels = PlantedLabels(TABLES, num_dense=2, seed=0, num_signal_tables=2)
    assert labels.signal_tables == ("mid", "tiny")


def test_a_linear_model_learns_them_from_ids_and_dense_features():
    data = SyntheticDataset(TABLES, batch_size=512, num_train_batches=150, num_val_batches=8)
    weights = [torch.zeros(table.num_embeddings, 1) for table in (TABLES[0], TABLES[2])]
    dense_weights = torch.zeros(13)
    for parameter in (*weights, dense_weights):
        parameter.requires_grad_()
    optimizer = torch.optim.Adagrad([*weights, dense_weights], lr=0.3)

    def scores(split: str, index: int, *, dense: bool = True) -> tuple[Tensor, Tensor]:
        batch = data.batch(split, index, rank=0, world_size=1)
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
        for dense, least in ((True, 0.75), (False, 0.6)):
            parts = [scores("val", i, dense=dense) for i in range(8)]
            found, labels = (torch.cat(part) for part in zip(*parts, strict=True))
            assert auroc(found, labels) > least
