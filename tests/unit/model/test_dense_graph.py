"""A replayed graph computes the results of a step for other batches; there is no GPU."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedTensor

from dlrm_sharded.model.dense_graph import NUM_WARMUP, DenseGraph, release_graphs
from tests.cuda import Graph, install_graphs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZE = 6


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The recorded graphs."""
    return install_graphs(monkeypatch)


class Dense:
    """A dense part of one table, its weights, and the number of times that it ran."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.layers = nn.Linear(SIZE, 1)
        self.num_runs = 0
        self.graph = DenseGraph(self.compute, list(self.layers.parameters()), device)

    def compute(
        self, features: Tensor, pooled: KeyedTensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        self.num_runs += 1
        logits = self.layers(features * pooled["a"]).squeeze(-1)
        return nn.functional.mse_loss(logits, labels), logits

    def results(self, compute: Any, batch: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        """Loss, logits and gradients of a step; then the weights move."""
        features, vectors, labels = batch
        vectors = vectors.clone().requires_grad_()
        for weight in self.layers.parameters():
            weight.grad = None
        loss, logits = compute(features, KeyedTensor(["a"], [SIZE], vectors), labels)
        loss.backward()
        gradients = [weight.grad.clone() for weight in self.layers.parameters()]
        with torch.no_grad():
            for weight in self.layers.parameters():
                weight.sub_(0.5 * weight.grad)
        assert vectors.grad is not None
        return [loss.detach(), logits.detach(), vectors.grad.clone(), *gradients]


def batches(*sizes: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    return [(random(size, SIZE), random(size, SIZE), random(size)) for size in sizes]


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_a_replay_computes_what_autograd_does(device, graphs):
    by_graph, by_autograd = Dense(device), Dense(CPU)
    found = [by_graph.results(by_graph.graph, batch) for batch in batches(4, 4, 4)]
    expected = [by_autograd.results(by_autograd.compute, batch) for batch in batches(4, 4, 4)]
    torch.testing.assert_close(found, expected)  # the results of a step outlive the next one
    assert [graph.num_replays for graph in graphs] == ([3] if device == CUDA else [])


def test_a_batch_of_another_size_is_computed_without_the_graph(graphs):
    by_graph, by_autograd = Dense(CUDA), Dense(CPU)
    found = [by_graph.results(by_graph.graph, batch) for batch in batches(4, 2, 4)]
    expected = [by_autograd.results(by_autograd.compute, batch) for batch in batches(4, 2, 4)]
    torch.testing.assert_close(found, expected)
    assert graphs[0].num_replays == 2
    assert by_graph.num_runs == NUM_WARMUP + 2  # the recording, and the batch of another size


def test_a_released_graph_is_gone_and_recorded_anew(graphs):
    dense = Dense(CUDA)
    for batch in batches(4, 4):
        dense.results(dense.graph, batch)
        recorded = weakref.ref(graphs.pop())
        assert recorded() is not None
        release_graphs(dense.graph)
        assert recorded() is None
