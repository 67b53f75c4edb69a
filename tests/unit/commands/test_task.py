"""The optimizer of a task.json and of the command line."""

import pytest

from dlrm_sharded.commands.asked_task import asked_task
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
    ("file", "overrides", "memory", "optimizer", "source"),
    [
        ("bare", "", SGD, "sgd", "task.json counts its memory"),
        ("rowwise_adagrad", "", ADAGRAD, "rowwise_adagrad", "task.json says"),
        ("old_adam", "", ADAM, "adam", "task.json counts its memory"),
        ("odd", "", ODD, None, "task.json counts its memory"),
        ("sgd", "optimizer=adam", ADAM, "adam", "the command line says"),
        ("adam", "optimizer=adagrad", ADAGRAD, "rowwise_adagrad", "the command line says"),
        ("odd", "optimizer=sgd", SGD, "sgd", "the command line says"),
        ("sgd", "optimizer.embedding=adam", ADAM, "adam", "the command line says"),
    ],
)
def test_the_optimizer_of_a_file_counts_unless_another_is_named(
    composed, caplog, file, overrides, memory, optimizer, source
):
    caplog.set_level("INFO")
    write_json("task.json", FILES[file].to_json())
    task, _ = asked_task(composed("plan", "task=task.json", *overrides.split()))
    assert (task.topology.bytes_per_element, task.topology.optimizer_bytes_per_row) == memory
    assert task.known_optimizer == optimizer
    said = f"{optimizer or 'unknown'}, as {source}: {memory[0]} B a weight and {memory[1]} B a row"
    assert f"the optimizer of the tables is {said}" in caplog.text


def test_adam_is_for_gpus(composed):
    for bytes_per_element, override in ((12, []), (4, ["optimizer=adam"])):
        on_cpus = Topology(2, 10**9, bytes_per_element=bytes_per_element, compute_device="cpu")
        write_json("task.json", ShardingTask(TASK.tables, on_cpus, 64).to_json())
        with pytest.raises(ConfigError, match=r"'adam', which FBGEMM fuses on CUDA only"):
            asked_task(composed("plan", "task=task.json", *override))


def test_a_task_of_data_names_its_optimizer(composed):
    data = ["data=synthetic", "data.max_rows=100", "batch_size=64", "topology.memory_gib=1"]
    assert asked_task(composed("plan", *data, "optimizer=adam"))[0].optimizer == "adam"
    on_cpus = composed("plan", *data, "optimizer=adam", "topology.compute_device=cpu")
    with pytest.raises(ConfigError, match=r"'adam', which FBGEMM fuses on CUDA only"):
        asked_task(on_cpus)
