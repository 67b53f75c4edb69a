"""Traces of runs as users start them: what they leave behind, and which cause they name."""

import gzip
import json
import re

import pytest

from tests.conftest import SMALL_RUN
from tests.e2e.planted import SLOW_RANK
from tests.e2e.runs import events_of, result_of, train, train_alone

TRACED = [
    *(*SMALL_RUN, "trainer.num_steps=11", "trainer.num_warmup_steps=3", "trainer.trace_steps=4"),
    *("trainer.trace=true", "trainer.checkpoint=null", "measure.iterations=3", "measure.warmup=1"),
]
SLOW = ["data.pregenerate=false", "+data.sleep_s=0.4"]
NUM_MEASURED = 20
"""All-to-alls of the measurement: five for each of its four iterations."""


def _lines(stderr: str) -> list[str]:
    return re.findall(r"trace of steps 5 to 8: (.*)", stderr)


def test_a_trace_of_all_ranks(tmp_path):
    done = train(tmp_path, *TRACED)
    assert _lines(done.stderr)[0].startswith("a traced step takes ")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    for rank in (0, 1):
        shown = {e["name"] for e in events if e["pid"] == rank}
        assert {"step 5", "step 8", "lookups", "update of tables", "all-reduce"} <= shown
        assert not {"step 4", "step 9"} & shown
    shown = events_of(tmp_path)
    tags = shown.Tags()
    assert {"trace/waiting_ms/max", "trace/fwd_comm_ms", "trace/step_ms"} <= set(tags["scalars"])
    assert "trace/parts_by_rank" in tags["images"]
    text = shown.Tensors("trace/explained/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "rank 1" in text
    parts = [t for t in tags["scalars"] if t.startswith("trace/") and t.count("/") == 1]
    values = {tag: shown.Scalars(tag)[0].value for tag in parts}
    step_ms = values.pop("trace/step_ms")
    values.pop("trace/exposed_ms")
    assert sum(values.values()) == pytest.approx(step_ms, rel=1e-3)
    # traced steps are in no throughput: 3 to warm up, 1 and 4 traced of 11 leave 3
    assert [e.step for e in shown.Scalars("train/step_ms")] == [3, 11]
    assert [e.step for e in shown.Scalars("train/loss")] == [3, 4, 8, 11]
    assert result_of(tmp_path)["samples_per_s"] is not None


@pytest.mark.parametrize("what", ["SlowReader", "SlowLookups"])
def test_a_slow_rank_is_named(tmp_path, what):
    done = train(tmp_path, *TRACED, f"data._target_=tests.e2e.planted.{what}", *SLOW)
    [line] = [li for li in _lines(done.stderr) if f"wait for rank {SLOW_RANK} for" in li]
    if what == "SlowReader":
        assert "reads its batches" in line
    else:
        assert "the lookup takes it" in line
        plan = json.loads((tmp_path / "plan.json").read_text())
        [named] = re.findall(r"heaviest tables: (.*)\)", line)
        of_rank = {shard["table"] for shard in plan["shards"] if shard["rank"] == SLOW_RANK}
        assert set(named.split(", ")) <= of_rank


def test_a_slow_layer_of_one_rank_is_named(tmp_path):
    model = ("model._target_=tests.e2e.planted.slow_on_one_rank", "+model.sleep_s=0.4")
    done = train(tmp_path, *TRACED, *model)
    [line] = [li for li in _lines(done.stderr) if f"wait for rank {SLOW_RANK} for" in li]
    assert "the dense forward takes it" in line
    assert any("Python in over_arch.0" in line for line in _lines(done.stderr))


def test_a_slow_link_is_named(tmp_path):
    link = ("data._target_=tests.e2e.planted.SlowLink", f"+data.is_fast_for={NUM_MEASURED}")
    done = train(tmp_path, *TRACED, *link, *SLOW)
    slow = [line for line in _lines(done.stderr) if "is slow: " in line]
    named = {line.partition(" is slow")[0] for line in slow}
    assert named == {
        "the redistribution of ids",
        "the exchange of pooled vectors",
        "the exchange of gradients",
    }


def test_a_wasteful_operator_is_named(tmp_path):
    model = ("model._target_=tests.e2e.planted.wasteful", "+model.size=1500")
    done = train(tmp_path, *TRACED, *model)
    [line] = [li for li in _lines(done.stderr) if "the dense forward is costly" in li]
    assert "most of it is aten::mm in over_arch.0 " in line


def test_evaluations_and_checkpoints_among_the_traced_steps(tmp_path):
    done = train(
        tmp_path,
        *(*TRACED[:-3], "trainer.eval_every_steps=6", "trainer.checkpoint.every_steps=7"),
        "trainer.pipeline=sparse_dist",
    )
    assert _lines(done.stderr)
    # a run that goes on traces again
    more = train(tmp_path, *TRACED[:-3], "trainer.num_steps=20", "resume=auto")
    assert "trace of steps 16 to 19: a traced step takes" in more.stderr
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert {e["name"] for e in events} >= {"step 16", "step 19"}


@pytest.mark.parametrize(("num_steps", "num_traced"), [(6, 2), (4, 0)])
def test_a_short_run_has_a_short_trace(tmp_path, num_steps, num_traced):
    done = train(tmp_path, *TRACED, f"trainer.num_steps={num_steps}", ranks=1)
    assert f"trainer.trace: {num_traced} of 4 steps are traced" in done.stderr
    assert (tmp_path / "trace.json.gz").exists() == bool(num_traced)


def test_a_trace_that_cannot_be_written_is_lost(tmp_path):
    (tmp_path / "trace.json.gz").mkdir()
    done = train(tmp_path, *TRACED, ranks=1)
    assert "the trace is lost" in done.stderr
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("value", ["trainer.trace=yes_please", "trainer.trace_steps=0"])
def test_wrong_values(tmp_path, value):
    done = train_alone(tmp_path, *TRACED, value, exit_code=2)
    assert value.partition("=")[0] in done.stderr
