"""Accesses to a model's tables, measured on batches of any form."""

import logging
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded import ShardedPlanner, Topology, plan_model
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.plans.tables import Table
from tests.unit.drop_in.synthetic import META, managed_bags, sequences

ONE = Topology(2, 10**9, compute_device="cpu")


def kjt(lengths: list[int], ids: list[int], *, keys: str = "fg", weighted: bool = False) -> Any:
    """Return a KeyedJaggedTensor of two samples, by default of the features f and g."""
    weights = torch.ones(len(ids)) if weighted else None
    return KeyedJaggedTensor(
        list(keys), torch.tensor(ids), lengths=torch.tensor(lengths), weights=weights
    )


def bag(name: str, *features: str, weighted: bool = False) -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(
        name=name, num_embeddings=60, embedding_dim=8, feature_names=[*features]
    )
    return EmbeddingBagCollection(tables=[config], device=META, is_weighted=weighted)


def planned(model: nn.Module, data: Any, **options: Any) -> dict[str, Table]:
    fixed = {"topology": ONE, "batch_size": 2, "cost_model": None}
    _, report = plan_model(model, "size", data=data, **(fixed | options))
    return {table.name: table for table in report.task.tables}


@dataclass
class Sample:
    dense: Tensor
    sparse: Any


class Plain:
    def __init__(self, value: Any) -> None:
        self.dense, self.inner = torch.ones(2), value


Pair = namedtuple("Pair", ["dense", "sparse"])

FORMS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda found: found,
    "tuple": lambda found: (torch.ones(2), [found]),
    "named": lambda found: Pair(torch.ones(2), found),
    "dict": lambda found: {"dense": torch.ones(2), "ids": {"a": found}},
    "dataclass": lambda found: Sample(torch.ones(2), found),
    "object": lambda found: Plain(Plain(found)),
}


def test_pooling_factors_that_are_assumed_or_not_used_are_said(caplog) -> None:
    planned(bag("t", "f", "g"), None)
    planned(bag("t", "f", "g"), None, pooling_factors={"t": 3.0})
    model = nn.ModuleDict({name: bag(name, "f") for name in "tuv"})
    stated = {"v": ParameterConstraints(pooling_factors=[2.0])}
    planned(model, None, pooling_factors={"t": 3.0}, constraints=stated)
    planned(
        bag("t", "f", "g"),
        kjt([2, 1, 0, 1], [1, 2, 1, 7]),
        batch_size=1,
        pooling_factors={"t": 3.0},
    )
    assert [r.getMessage() for r in caplog.records if "pooling" in r.getMessage()] == [
        "pooling factors of 1 of 1 tables are taken as 1; give data or pooling_factors",
        "pooling factors of 1 of 3 tables are taken as 1; give data or pooling_factors",
        "pooling_factors are not used, because data measures them",
    ]


@pytest.mark.parametrize("form", FORMS)
def test_accesses_are_those_of_a_global_batch(form: str) -> None:
    """Two batches of two samples are one of four: ids 1 and 2 are used 3 times, 7 and 8 once."""
    batches = [kjt([2, 1, 0, 1], [1, 2, 1, 7]), kjt([1, 1, 1, 1], [2, 1, 2, 8])]
    data = [FORMS[form](batch) for batch in batches * 5]
    table = planned(bag("t", "f", "g"), data)["t"]
    assert table.pooling_factor == 2.0
    assert table.reuse_histogram == (0.5, 0.0, 0.5, *(0.0,) * 14)


def test_no_more_is_read_than_a_global_batch(caplog: pytest.LogCaptureFixture) -> None:
    read = []

    def batches() -> Iterator[Any]:
        for i in range(10):
            read.append(i)
            yield kjt([1, 1, 1, 1], [1, 2, 3, 4])

    with caplog.at_level(logging.INFO):
        planned(bag("t", "f"), batches())
        assert len(read) == 2
        assert "measured the accesses to 1 of 1 tables in 2 batches (4 samples)" in caplog.text
        planned(bag("t", "f"), batches(), max_batches=1)
    assert len(read) == 3
    assert "data has 2 samples, and a global batch 4" in caplog.text


def test_weighted_modules_look_up_the_weighted_ids(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"plain": bag("t", "f"), "weighted": bag("w", "f", weighted=True)})
    batch = kjt([1, 1, 1, 1], [1] * 4), kjt([3, 3, 0, 0], [1] * 6, weighted=True)
    found = planned(nn.ModuleDict({"all": model, "other": sequences()}), [batch] * 2)
    assert (found["t"].pooling_factor, found["w"].pooling_factor) == (1.0, 3.0)
    assert found["s0"].reuse_histogram is None
    assert "data has no feature of s0, s1" in caplog.text


def test_a_function_says_which_ids_a_module_looks_up() -> None:
    model = nn.ModuleDict({"a": bag("t", "f"), "b": bag("u", "f")})
    batch = kjt([1, 1, 1, 1], [1] * 4), kjt([3, 3, 0, 0], [1] * 6)
    with pytest.raises(DataError, match=r"feature 'f' of module 'a'.* is in 2"):
        planned(model, [batch])
    found = planned(model, [batch], kjts_of=lambda pair: {"a": pair[1], "b": pair[0]})
    assert (found["t"].pooling_factor, found["u"].pooling_factor) == (3.0, 1.0)


BATCH = kjt([1, 1, 1, 1], [1, 2, 3, 4])


@pytest.mark.parametrize("form", FORMS)
def test_one_batch_is_data(form: str) -> None:
    assert planned(bag("t", "f", "g"), FORMS[form](BATCH))["t"].pooling_factor == 2.0


def test_parts_of_a_batch_are_one_batch() -> None:
    parts = kjt([2, 2], [1, 2, 3, 4], keys="f"), kjt([1, 1], [1, 2], keys="g")
    found = planned(nn.ModuleDict({"a": bag("t", "f"), "b": bag("u", "g")}), parts)
    assert (found["t"].pooling_factor, found["u"].pooling_factor) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([BATCH, None], "batch 1 of data is None, in which no"),
        ([torch.ones(3)], r"data is \[tensor.*\], in which no"),
        ([[torch.ones(3)]], r"batch 0 of data is \[tensor.*\], in which no"),
        (7, "data is 7, in which no"),
        ([], r"data has 0 batches and no sample in them \(\[\]\)"),
        ({"dense": torch.ones(3)}, "data is {'dense': tensor.*}, in which no"),
    ],
)
def test_other_data_is_refused_in_a_line_that_says_what_it_is(data: Any, said: str) -> None:
    with pytest.raises(DataError, match=f"^{said}.*; give a KeyedJaggedTensor, .*$"):
        planned(bag("t", "f"), data)
    assert ShardedPlanner(data=[]).data == []


def test_what_a_function_does_not_find_is_refused() -> None:
    with pytest.raises(DataError, match=r"batch 0 of data is .*, in which no KeyedJ"):
        planned(bag("t", "f"), [BATCH], kjts_of=lambda batch: None)


def test_ids_that_a_table_lacks_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    model = bag("a", "f", "g")
    rows = model.embedding_bag_configs()[0].num_embeddings
    batches = [kjt([1, 1, 1, 1], [0, rows, 1, 2 * rows]), kjt([1, 1, 1, 1], [0, 0, 1, rows])]
    planned(model, batches, batch_size=4)
    (said,) = [record.message for record in caplog.records if "beyond" in record.message]
    text = f"has ids beyond its {rows} rows (1, up to {rows}), in batch 0 of data; a training"
    assert said.startswith(f"feature 'f' of table 'a' {text}")


def test_managed_collisions_map_any_id_to_a_row(caplog: pytest.LogCaptureFixture) -> None:
    model = managed_bags(rows=100)
    (config, *_) = model._embedding_module.embedding_bag_configs()
    ids = torch.tensor([7, 10**12])
    planned(model, KeyedJaggedTensor(config.feature_names, ids, lengths=torch.tensor([1, 1])))
    assert "beyond" not in caplog.text


@pytest.mark.parametrize(
    ("lengths", "ids", "said"),
    [
        (
            [1, 1],
            [1, -4],
            r"feature 'g' of table 'a' has ids below 0 \(1, down to -4\), in batch 0",
        ),
        ([2, -1, 1, 0], [1, 2], "the smallest is -1"),
    ],
    ids=["negative", "lengths"],
)
def test_ids_that_no_table_can_have_are_refused(lengths: Any, ids: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        planned(bag("a", "f", "g"), [kjt(lengths, ids)])
