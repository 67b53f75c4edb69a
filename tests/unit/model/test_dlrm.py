"""The model is TorchRec's where dims are equal."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.model.dlrm import Dlrm, dlrm, dlrm_dcnv2, embedding_parameters
from dlrm_sharded.model.interaction import DotInteraction
from dlrm_sharded.model.torchrec_adapter import bag_configs
from dlrm_sharded.plans.tables import Table, tables_by_feature

CPU = torch.device("cpu")
NUM_DENSE, BATCH_SIZE = 5, 12
LAYERS = {"dense_layers": [16, 8], "over_layers": [16, 4, 1]}
CROSS = {"num_cross_layers": 2, "cross_rank": 6}
EQUAL = tuple(Table(f"t{i}", 20 + i, 8, 2.0) for i in range(3))
SHARED = (Table("t0", 20, 8, 4.0, num_features=2, features=("seen", "bought")), *EQUAL[1:])
MIXED = tuple(Table(f"t{i}", 20 + i, dim, 2.0) for i, dim in enumerate([4, 8, 16, 4]))


def collection(tables: tuple[Table, ...]) -> EmbeddingBagCollection:
    """On the CPU, where the model has one on the meta device, for the sharding to fill."""
    return EmbeddingBagCollection(tables=bag_configs(tables), device=CPU)


def make(interaction: str, tables: tuple[Table, ...], **changes: Any) -> Dlrm:
    torch.manual_seed(0)
    arguments = {"num_dense": NUM_DENSE, **LAYERS, "device": CPU, **changes}
    if interaction == "dot":
        model = dlrm(tables, **arguments)
    else:
        model = dlrm_dcnv2(tables, **CROSS, **arguments)
    model.sparse_arch.embedding_bag_collection = collection(tables)
    return model


def torchrec_model(interaction: str, tables: tuple[Table, ...]) -> nn.Module:
    layers = {
        "dense_arch_layer_sizes": LAYERS["dense_layers"],
        "over_arch_layer_sizes": LAYERS["over_layers"],
    }
    if interaction == "dot":
        return DLRM(collection(tables), NUM_DENSE, **layers)
    return DLRM_DCN(
        collection(tables),
        NUM_DENSE,
        dcn_num_layers=CROSS["num_cross_layers"],
        dcn_low_rank_dim=CROSS["cross_rank"],
        **layers,
    )


def batch(tables: tuple[Table, ...]) -> Batch:
    generator = torch.Generator().manual_seed(1)
    features = list(tables_by_feature(tables))
    lengths = torch.randint(0, 4, (len(features), BATCH_SIZE), generator=generator)
    ids = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
    return Batch(
        torch.rand(BATCH_SIZE, NUM_DENSE, generator=generator),
        KeyedJaggedTensor(features, ids, lengths=lengths.flatten().int()),
        torch.randint(0, 2, (BATCH_SIZE,), generator=generator).float(),
    )


@pytest.mark.parametrize("tables", [EQUAL, SHARED], ids=["a_feature_each", "shared"])
@pytest.mark.parametrize("interaction", ["dot", "dcnv2"])
def test_equal_dims_are_torchrecs_model(interaction, tables):
    theirs = torchrec_model(interaction, tables)
    ours = make(interaction, tables)
    ours.load_state_dict(theirs.state_dict())  # strict: the same weights, and no others
    example = batch(tables)
    loss, (detached_loss, logits, labels) = ours(example)
    expected = theirs(example.dense_features, example.sparse_features).squeeze(-1)
    torch.testing.assert_close(logits, expected.detach())
    log_loss = nn.functional.binary_cross_entropy_with_logits(expected, example.labels)
    torch.testing.assert_close(loss, log_loss)
    assert torch.equal(detached_loss, loss)
    assert torch.equal(labels, example.labels)
    assert not logits.requires_grad

    loss.backward()
    log_loss.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])


@pytest.mark.parametrize("interaction", ["dot", "dcnv2"])
def test_mixed_dims_are_projected(interaction):
    model = make(interaction, MIXED)
    projections = model.vector_stack.projections
    shapes = {dim: tuple(p.weight.shape) for dim, p in projections.items()}
    assert shapes == {"4": (8, 4), "16": (8, 16)}
    loss, (_, logits, _) = model(batch(MIXED))
    assert logits.shape == (BATCH_SIZE,)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_stack_is_in_the_models_order(order):
    """[B, 1 + F, D]: tables of one dim together, each vector times the matrix of its dim."""
    model = make("dot", MIXED)
    vectors = {t.name: torch.rand(BATCH_SIZE, t.embedding_dim) for t in MIXED}
    names = [MIXED[i].name for i in order]
    pooled = KeyedTensor.from_tensor_list(names, [vectors[name] for name in names])
    dense = torch.rand(BATCH_SIZE, 8)

    stacked = model.vector_stack(dense, pooled)

    assert stacked.shape == (BATCH_SIZE, 5, 8)
    torch.testing.assert_close(stacked[:, 0], dense)
    for place, name in enumerate(["t0", "t3", "t1", "t2"], start=1):
        dim = vectors[name].shape[1]
        project = model.vector_stack.projections[str(dim)] if dim != 8 else nn.Identity()
        torch.testing.assert_close(stacked[:, place], project(vectors[name]))


@pytest.mark.parametrize("num_vectors", [1, 2, 5])
def test_dot_interaction_has_the_gradient_of_autograd(num_vectors):
    interaction = DotInteraction(num_vectors, device=CPU)
    vectors = torch.rand(3, num_vectors, 4, dtype=torch.float64, requires_grad=True)

    assert interaction(vectors).shape == (3, 4 + interaction.num_pairs)
    assert torch.autograd.gradcheck(interaction, vectors)


@pytest.mark.parametrize("tables", [EQUAL, MIXED], ids=["equal", "mixed"])
@pytest.mark.parametrize("interaction", ["dot", "dcnv2"])
def test_bf16_is_for_the_dense_part(interaction, tables):
    exact = make(interaction, tables)
    rounded = make(interaction, tables, bf16=True)
    rounded.load_state_dict(exact.state_dict())
    dtypes: dict[str, torch.dtype] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            value = output if isinstance(output, Tensor) else output.values()
            dtypes[name] = value.dtype

        return hook

    rounded.sparse_arch.embedding_bag_collection.register_forward_hook(note("pooled"))
    rounded.dense_arch.register_forward_hook(note("dense"))
    rounded.over_arch.register_forward_hook(note("over"))
    example = batch(tables)
    loss, (_, logits, _) = rounded(example)
    loss.backward()

    assert dtypes == {"pooled": torch.float32, "dense": torch.bfloat16, "over": torch.bfloat16}
    assert {p.grad.dtype for p in rounded.parameters()} == {torch.float32}
    assert loss.dtype == logits.dtype == torch.float32
    expected = exact(example)[1][1]
    assert not torch.equal(logits, expected)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0.02)


def test_tables_wait_for_the_sharding():
    """No rank holds what it will not train."""
    model = dlrm(MIXED, NUM_DENSE, **LAYERS, device=CPU)
    weights = embedding_parameters(model)
    by_row_bytes = [(22, 16), (21, 8), (20, 4), (23, 4)]  # so that wide rows are aligned
    assert [tuple(w.shape) for w in weights] == by_row_bytes
    assert {w.device.type for w in weights} == {"meta"}
    others = {id(p) for p in model.parameters()} - {id(w) for w in weights}
    assert {p.device.type for p in model.parameters() if id(p) in others} == {"cpu"}


def test_bad_compile_mode():
    with pytest.raises(ConfigError, match=r"model\.compile_mode is 'fast'; known: none, default"):
        make("dot", EQUAL, compile_mode="fast")


def test_compiles_the_layers(monkeypatch):
    compiled = []
    monkeypatch.setattr(
        nn.Module, "compile", lambda module, mode: compiled.append((type(module).__name__, mode))
    )
    make("dot", EQUAL, compile_mode="reduce-overhead")
    assert compiled == [
        (layers, "reduce-overhead") for layers in ("DenseLayers", "DotInteraction", "OverLayers")
    ]
    compiled.clear()
    make("dot", EQUAL)
    assert not compiled
