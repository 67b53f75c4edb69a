"""Tasks, tables and topologies: their checks, and their files."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded.files.errors import ConfigError, check_count
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.files.json_forms import form_of
from dlrm_sharded.plans.tables import Table, tables_by_feature
from dlrm_sharded.plans.task import MAX_BYTES, ShardingTask, Topology, read_task, with_optimizer
from tests.unit.synthetic import task_of

TABLE = Table("t", 100, 16, 2.0)


def task(**topology: Any) -> ShardingTask:
    return task_of([TABLE], memory_bytes=10**6, batch_size=64, **{"device": "cuda", **topology})


def ranks(**changes: object) -> dict[str, object]:
    """A task.json's two ranks, of which some figures are other ones."""
    return {"topology": {"world_size": 2, "memory_bytes": 9} | changes}


def by_rank(value: object) -> dict[str, object]:
    return ranks(memory_bytes_by_rank=value)


def with_fields(**changes: object) -> dict[str, object]:
    """A task.json's one table, of which some figures are other ones."""
    return {"tables": [form_of(TABLE) | changes]}


@pytest.mark.parametrize("bandwidth", [1e-300, 1e-9, 0, -1, 1e300, float("inf"), float("nan")])
def test_impossible_bandwidths(bandwidth: float) -> None:
    with pytest.raises(ConfigError, match=r"intra_host_bytes_per_s is .*; it must be a number"):
        Topology(2, 1, intra_host_bytes_per_s=bandwidth)


def test_limits_of_counts_are_said() -> None:
    check_count("seed", 2**62, least=0)
    for value, message in (
        (-1, "must be an integer >= 0"),
        (2**62 + 1, "from 0 to 4,611,686,018,"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_count("seed", value, least=0)


def test_task_json_defaults(tmp_path: Path) -> None:
    """The least that a task.json may say, with the documented defaults."""
    table = {"name": "t", "num_embeddings": 10, "embedding_dim": 8, "pooling_factor": 1.5}
    tables = [table, table | {"name": "u", "reuse_histogram": [1.0] + [0.0] * 16}]
    topology = {"world_size": 2, "memory_bytes": 1000}
    fields = {"tables": tables, "topology": topology, "batch_size": 4}
    write_json(tmp_path / "task.json", fields)
    found = read_task(tmp_path / "task.json")
    assert found.topology.ranks_per_host == 2
    assert found.topology.bytes_per_element == 4
    assert found.topology.optimizer_bytes_per_row == 0
    assert found.tables[1].reuse_histogram == (1.0,) + (0.0,) * 16
    assert ShardingTask.from_json(found.to_json()).tables == found.tables


def test_names_of_features_are_not_in_a_task_json() -> None:
    shared = dataclasses.replace(TABLE, num_features=2, features=["seen", "bought"])
    assert (TABLE.feature_names, shared.feature_names) == (("t",), ("seen", "bought"))
    assert tables_by_feature([shared, TABLE]) == {"seen": shared, "bought": shared, "t": TABLE}
    assert form_of(shared) == form_of(TABLE) | {"num_features": 2}
    for num_features, features in ((1, ("a", "b")), (2, ("a",)), (2, ("a", "a"))):
        with pytest.raises(
            ConfigError, match=f"num_features is {num_features}; it must be the num"
        ):
            dataclasses.replace(TABLE, num_features=num_features, features=features)


@pytest.mark.parametrize("by_rank", [None, (1, 2**40, 3)])
def test_task_json_round_trip(tmp_path: Path, by_rank: tuple[int, ...] | None) -> None:
    ranks = {"local_world_size": 1, "inter_host_bytes_per_s": 1e9, "memory_bytes_by_rank": by_rank}
    full = task_of([TABLE], 3, 1000, **ranks)
    write_json(tmp_path / "task.json", full.to_json())
    assert read_task(tmp_path / "task.json") == full
    fields = json.loads((tmp_path / "task.json").read_text())["topology"]
    assert fields.get("memory_bytes_by_rank") == (by_rank and list(by_rank))
    assert ("memory_bytes_by_rank" in fields) == (by_rank is not None)


@pytest.mark.parametrize(
    ("optimizer", "memory", "replicates"),
    [
        ("sgd", (4, 0), True),
        ("rowwise_adagrad", (4, 4), True),
        ("elementwise_adagrad", (8, 0), True),
        ("adam", (12, 0), False),
        (None, (16, 0), True),
    ],
)
def test_optimizer_of_a_task(optimizer: str | None, memory: tuple[int, int], replicates: bool):
    """It is stated, and its memory follows; or it follows from the memory that is stated."""
    unnamed = ShardingTask((TABLE,), Topology(2, 10**6, 2, *memory), 64)
    assert "optimizer" not in unnamed.to_json()
    assert (unnamed.known_optimizer, unnamed.can_replicate) == (optimizer, replicates)
    if optimizer is None:
        return
    named = with_optimizer(unnamed, optimizer)
    assert named == dataclasses.replace(unnamed, optimizer=optimizer)
    assert ShardingTask.from_json(named.to_json()) == named
    ranks = {"world_size": 2, "local_world_size": 2, "memory_bytes": 10**6}
    assert ShardingTask.from_json(named.to_json() | {"topology": ranks}) == named


def test_memory_of_ranks_is_a_tuple() -> None:
    """A topology can be compared, hashed and not changed."""
    listed = Topology(2, 9, memory_bytes_by_rank=[5, 5])  # type: ignore[arg-type]
    assert {listed} == {Topology(2, 9, memory_bytes_by_rank=(5, 5))}


def test_a_task_says_which_lookups_support_fewer_columns() -> None:
    """As those of FBGEMM before 1.7 on GPUs; the figure is that of the device by default."""
    old = task(column_limit=1024)
    assert old.to_json()["topology"]["column_limit"] == 1024
    assert ShardingTask.from_json(old.to_json()).topology.max_shard_columns == 1024
    assert task().topology.max_shard_columns == 2048
    assert "column_limit" not in task().to_json()["topology"]


BAD = [
    ({"tables": []}, "no tables"),
    ({"tables": [form_of(TABLE)] * 2}, "2 tables are named 't'"),
    ({"batch_size": 0}, "batch_size is 0"),
    ({"topology": {"world_size": 2}}, "memory_bytes"),
    (ranks(world_size=0), "topology.world_size is 0"),
    (ranks(gpus=2), "gpus"),
    (ranks(world_size=3, local_world_size=2), "divide"),
    ({"tables": 3}, r"`array`, got `int` - at `\$.tables`"),
    ({"tables": [3]}, r"`object`, got `int` - at `\$.tables\[0\]`"),
    ({"more": 3}, "more"),
    ({"batch_size": "abc"}, r"`int`, got `str` - at `\$.batch_size`"),
    (ranks(world_size=1e9), r"at `\$.topology.world_size`"),
    (ranks(memory_bytes=float("nan")), r"topology.memory_bytes`"),
    (
        ranks(intra_host_bytes_per_s="fast"),
        r"`int . float . null`, got `str` - at `\$.topology.intra_host_bytes_per_s`",
    ),
    (ranks(compute_device="tpu"), r"compute_device is 'tpu'; known: cpu, cuda - at `\$.topo"),
    ({"optimizer": "adagrad"}, "optimizer is 'adagrad'; known: sgd, rowwise_adagrad, elementw"),
    ({"optimizer": ["sgd"]}, r"got `array` - at `\$.optimizer`"),
    ({"optimizer": "adam"}, "'adam', and topology.bytes_per_element is 4; it must be 12"),
    ({"optimizer": "rowwise_adagrad"}, "optimizer_bytes_per_row is 0; it must be 4"),
    (
        {"optimizer": "adam", **ranks(compute_device="cpu")},
        "'adam', which FBGEMM fuses on CUDA only",
    ),
    ({"tables": [{"name": "t"}]}, r"missing .* `num_embeddings` - at `\$.tables\[0\]`"),
    (with_fields(num_embeddings="x"), r"tables\[0\].num_embeddings`"),
    (with_fields(num_embeddings=0), "'t': num_embeddings is 0"),
    (with_fields(reuse_histogramm=[]), "field `reuse_histogramm`"),
    (with_fields(precision="fp8"), "'t': precision is 'fp8'; known: fp32, fp16"),
    (with_fields(layouts=["rows"]), "field `layouts`"),
    (by_rank("80"), r"`array . null`, got `str` - at `\$.topology.memory_bytes_by_rank`"),
    (by_rank([]), "has 0 figures; it must have one for each of the 2 ranks"),
    (by_rank([5, 0]), r"memory_bytes_by_rank\[1\] is 0"),
    (by_rank([5, 5.0]), r"got `float` - at `\$.topology.memory_bytes_by_rank\[1\]`"),
    (by_rank([5, MAX_BYTES + 1]), rf"memory_bytes_by_rank\[1\] is {MAX_BYTES + 1}"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_task(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardingTask.from_json(task().to_json() | change)
