"""The optimizer of a task.json, of the command line, and of the runs that are advised."""

import pytest
from omegaconf import OmegaConf

from dlrm_sharded.commands.advise_config import question_of, same_in_run, stated_task
from dlrm_sharded.commands.task import OPTIMIZER_FILES, asked_task, task_of_file
from dlrm_sharded.commands.yamls import CONF_DIR
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology, with_optimizer
from dlrm_sharded.ranks.workers import Refusal

TASK = ShardingTask((Table("a", 1000, 16, 1.0),), Topology(2, 10**9), 64)
FILES = {
    "bare": TASK,
    "sgd": with_optimizer(TASK, "sgd"),
    "rowwise_adagrad": with_optimizer(TASK, "rowwise_adagrad"),
    "adam": with_optimizer(TASK, "adam"),
    "old_adam": ShardingTask(TASK.tables, with_optimizer(TASK, "adam").topology, 64),
    "odd": ShardingTask(TASK.tables, Topology(2, 10**9, bytes_per_element=8), 64),
}
ADAM, ADAGRAD, SGD, ODD = (12, 0), (4, 4), (4, 0), (8, 0)


@pytest.mark.parametrize(
    ("file", "overrides", "memory", "optimizer", "in_run", "note"),
    [
        ("bare", "", SGD, "sgd", "optimizer=sgd", "4 B a weight and 0 B a row, the memory of sgd"),
        ("sgd", "", SGD, "sgd", "optimizer=sgd", "names sgd"),
        ("rowwise_adagrad", "", ADAGRAD, "rowwise_adagrad", "", None),
        ("adam", "", ADAM, "adam", "optimizer=adam", "names adam"),
        ("old_adam", "", ADAM, "adam", "optimizer=adam", "0 B a row, the memory of adam"),
        ("odd", "", ODD, None, "", "8 B a weight and 0 B a row, as no optimizer of a run does"),
        ("sgd", "optimizer=adam", ADAM, "adam", None, "counts 4 B a weight"),
        ("adam", "optimizer=adam", ADAM, "adam", None, None),
        ("adam", "optimizer=adagrad", ADAGRAD, "rowwise_adagrad", None, "counts 12 B a weight"),
        ("odd", "optimizer=sgd", SGD, "sgd", None, "takes 4 B a weight and 0 B a row"),
        ("sgd", "optimizer.embedding=adam", ADAM, "adam", None, "as the command line says"),
        (
            *("adam", "optimizer.dense=sgd", ADAM, "adam"),
            *("optimizer=adam optimizer.dense=sgd", "names adam"),
        ),
    ],
)
def test_the_run_that_is_priced_is_the_one_that_is_advised(
    composed, file, overrides, memory, optimizer, in_run, note
):
    """None for `in_run` stands for what the command line has."""
    write_json("task.json", FILES[file].to_json())
    asked = ["task=task.json", "sharder=dim", "hardware=h100", "ranks=2"]
    cfg = composed("advise", *asked, *overrides.split())
    of_file = stated_task(cfg)
    question, _ = question_of(cfg, of_file)
    [case] = question.cases
    task = case.task
    assert isinstance(task, ShardingTask)
    assert (task.topology.bytes_per_element, task.topology.optimizer_bytes_per_row) == memory
    assert task.optimizer == question.context_of(case, task).optimizer == optimizer
    advised = same_in_run(of_file)
    assert " ".join(advised) == (overrides if in_run is None else in_run)
    assert of_file.note is None if note is None else note in (of_file.note or "")
    run = composed("train", *advised).optimizer
    assert run.dense == question.dense.optimizer.dense
    assert optimizer is None or run.embedding == optimizer


def test_adam_is_for_gpus_whatever_the_file_is_for(composed):
    for bytes_per_element, override in ((12, []), (4, ["optimizer=adam"])):
        on_cpus = Topology(2, 10**9, bytes_per_element=bytes_per_element, compute_device="cpu")
        write_json("task.json", ShardingTask(TASK.tables, on_cpus, 64).to_json())
        with pytest.raises(ConfigError, match=r"'adam', which FBGEMM fuses on CUDA only"):
            task_of_file(composed("plan", "task=task.json", *override))
        question_text = ["task=task.json", "sharder=dim", "ranks=1", *override]
        cfg = composed("advise", *question_text, "hardware=[h100,cpu]")
        question, _ = question_of(cfg, stated_task(cfg))
        on_gpu, on_cpu = (case.task for case in question.cases)
        assert isinstance(on_gpu, ShardingTask)
        assert on_gpu.optimizer == "adam"
        assert isinstance(on_cpu, Refusal)
        assert "fuses on CUDA only" in on_cpu.message


def test_every_optimizer_of_tables_has_a_file():
    folder = CONF_DIR / "optimizer"
    found = {OmegaConf.load(path).embedding: path.stem for path in folder.glob("*.yaml")}
    assert found == OPTIMIZER_FILES


def test_a_task_of_data_names_its_optimizer(composed):
    data = ["data=synthetic", "data.max_rows=100", "batch_size=64", "topology.memory_gib=1"]
    assert asked_task(composed("plan", *data, "optimizer=adam"), "plan").task.optimizer == "adam"
    on_cpus = composed("plan", *data, "optimizer=adam", "topology.compute_device=cpu")
    with pytest.raises(ConfigError, match=r"'adam', which FBGEMM fuses on CUDA only"):
        asked_task(on_cpus, "plan")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["topology.host_memory_gib=9"], r"host_memory_gib is 9, and no sharder uses it; ask"),
        (["sharder.cache_tables=auto"], r"cache_tables is auto, which needs host memory; state"),
        (["sharder.cache_tables=auto", "topology.host_memory_gib=9"], None),
    ],
    ids=["unused", "unknown", "both"],
)
def test_host_memory_is_used_where_it_is_asked_for(composed, overrides, message):
    write_json("task.json", TASK.to_json())
    cfg = composed("advise", "task=task.json", "sharder=neuroshard", "ranks=2", *overrides)
    of_file = stated_task(cfg)
    if message is None:
        [case] = question_of(cfg, of_file)[0].cases
        assert isinstance(case.task, ShardingTask)
        assert case.task.topology.host_memory_bytes == 9 * GIB
        return
    with pytest.raises(ConfigError, match=message):
        question_of(cfg, of_file)
