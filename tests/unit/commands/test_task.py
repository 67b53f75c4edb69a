"""The optimizer of a task.json and of the command line."""

import pytest
from omegaconf import OmegaConf

from dlrm_sharded.commands.task import OPTIMIZER_FILES, asked_task
from dlrm_sharded.commands.yamls import CONF_DIR
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology, with_optimizer

TASK = ShardingTask((Table("a", 1000, 16, 1.0),), Topology(2, 10**9), 64)
FILES = {
    "bare": TASK,
    "sgd": with_optimizer(TASK, "sgd"),
    "rowwise_adagrad": with_optimizer(TASK, "rowwise_adagrad"),
    "adam": with_optimizer(TASK, "adam"),
    "old_adam": ShardingTask(TASK.tables, with_optimizer(TASK, "adam").topology, 64),
    "odd": ShardingTask(TASK.tables, Topology(2, 10**9, bytes_per_element=16), 64),
}
ADAM, ADAGRAD, SGD, ODD = (12, 0), (4, 4), (4, 0), (16, 0)


@pytest.mark.parametrize(
    ("file", "overrides", "memory", "optimizer", "note"),
    [
        ("bare", "", SGD, "sgd", "4 B a weight and 0 B a row, the memory of sgd"),
        ("sgd", "", SGD, "sgd", "names sgd, so that runs have optimizer=sgd"),
        ("rowwise_adagrad", "", ADAGRAD, "rowwise_adagrad", None),
        ("adam", "", ADAM, "adam", "names adam"),
        ("old_adam", "", ADAM, "adam", "0 B a row, the memory of adam"),
        ("odd", "", ODD, None, "16 B a weight and 0 B a row, as no optimizer of a run does"),
        ("sgd", "optimizer=adam", ADAM, "adam", "counts 4 B a weight"),
        ("adam", "optimizer=adam", ADAM, "adam", None),
        (
            "sgd",
            "optimizer=elementwise_adagrad",
            (8, 0),
            "elementwise_adagrad",
            "takes 8 B a weight",
        ),
        ("adam", "optimizer=adagrad", ADAGRAD, "rowwise_adagrad", "counts 12 B a weight"),
        ("odd", "optimizer=sgd", SGD, "sgd", "takes 4 B a weight and 0 B a row"),
        ("sgd", "optimizer.embedding=adam", ADAM, "adam", "as the command line says"),
    ],
)
def test_the_optimizer_of_a_file_counts_unless_another_is_named(
    composed, file, overrides, memory, optimizer, note
):
    write_json("task.json", FILES[file].to_json())
    asked = asked_task(composed("plan", "task=task.json", *overrides.split()))
    topology = asked.task.topology
    assert (topology.bytes_per_element, topology.optimizer_bytes_per_row) == memory
    assert asked.task.known_optimizer == optimizer
    assert asked.note is None if note is None else note in (asked.note or "")


def test_adam_is_for_gpus(composed):
    for bytes_per_element, override in ((12, []), (4, ["optimizer=adam"])):
        on_cpus = Topology(2, 10**9, bytes_per_element=bytes_per_element, compute_device="cpu")
        write_json("task.json", ShardingTask(TASK.tables, on_cpus, 64).to_json())
        with pytest.raises(ConfigError, match=r"'adam', which FBGEMM fuses on CUDA only"):
            asked_task(composed("plan", "task=task.json", *override))


def test_every_optimizer_of_tables_has_a_file():
    folder = CONF_DIR / "optimizer"
    found = {OmegaConf.load(path).embedding: path.stem for path in folder.glob("*.yaml")}
    assert found == OPTIMIZER_FILES


def test_a_task_of_data_names_its_optimizer(composed):
    data = ["data=synthetic", "data.max_rows=100", "batch_size=64", "topology.memory_gib=1"]
    assert asked_task(composed("plan", *data, "optimizer=adam")).task.optimizer == "adam"
    on_cpus = composed("plan", *data, "optimizer=adam", "topology.compute_device=cpu")
    with pytest.raises(ConfigError, match=r"'adam', which FBGEMM fuses on CUDA only"):
        asked_task(on_cpus)
