"""Code that only CUDA runs has run once: by a named test with a stand-in, or by a named trial.

`cuda_only` finds such code by its text, and `cuda_trace` sees which of it the named tests run. So a
new branch for CUDA fails here until a test of `RUN_BY` runs it, or a trial stands for it.
"""

import textwrap
from pathlib import Path

import pytest

from tests import preloaded
from tests.conftest import ROOT
from tests.cuda_only import Piece, all_pieces, find_pieces
from tests.cuda_trace import Tracer

UNIT = "tests/unit"
COMMANDS, MEASURING, RANKS, TRAINING = (
    f"{UNIT}/on_cuda/test_{name}.py" for name in ("commands", "measuring", "ranks", "training")
)
PREFETCH = f"{UNIT}/training/test_prefetch.py"
PRIOR = f"{UNIT}/cost/test_gpu_prior.py"

RUN_BY = {
    "dlrm_sharded/calibration/collect.py": [
        f"{UNIT}/calibration/test_collect.py::test_only_a_collection_on_a_cpu_depends_on_its_cores"
    ],
    "dlrm_sharded/calibration/plan_sizes.py": [f"{UNIT}/calibration/test_plan_sizes.py"],
    "dlrm_sharded/checkpoint/saver.py": [TRAINING],
    "dlrm_sharded/commands/check_install.py": [COMMANDS],
    "dlrm_sharded/commands/collect_costs.py": [COMMANDS],
    "dlrm_sharded/commands/sharders.py": [COMMANDS],
    "dlrm_sharded/cost/learned.py": [PRIOR, COMMANDS],
    "dlrm_sharded/cost/learned_arrays.py": [PRIOR],
    "dlrm_sharded/datasets/base.py": [PREFETCH],
    "dlrm_sharded/datasets/synthetic.py": [PREFETCH],
    "dlrm_sharded/dense/model.py": [f"{UNIT}/dense/test_work.py"],
    "dlrm_sharded/dense/times.py": [f"{UNIT}/dense/test_times.py"],
    "dlrm_sharded/files/provenance.py": [RANKS],
    "dlrm_sharded/hardware/cuda.py": [MEASURING],
    "dlrm_sharded/hardware/detect.py": [MEASURING],
    "dlrm_sharded/hardware/probing.py": [MEASURING],
    "dlrm_sharded/job/memory_check.py": [f"{UNIT}/job/test_memory_check.py"],
    "dlrm_sharded/job/predicted_step.py": [f"{UNIT}/job/test_predicted_step.py"],
    "dlrm_sharded/measuring/stage_clock.py": [f"{UNIT}/measuring/test_stage_clock.py"],
    "dlrm_sharded/model/dense_graph.py": [f"{UNIT}/model/test_dense_graph.py"],
    "dlrm_sharded/plans/tables.py": [f"{UNIT}/plans/test_tables.py"],
    "dlrm_sharded/ranks/devices.py": [f"{UNIT}/ranks/test_devices.py"],
    "dlrm_sharded/ranks/distributed.py": [RANKS, f"{UNIT}/ranks/test_distributed.py"],
    "dlrm_sharded/ranks/launch_clock.py": [f"{UNIT}/ranks/test_launch_clock.py"],
    "dlrm_sharded/ranks/stopwatch.py": [RANKS],
    "dlrm_sharded/runs/terminal.py": [f"{UNIT}/runs/test_terminal.py"],
    "dlrm_sharded/tracing/recorder.py": [TRAINING],
    "dlrm_sharded/training/host_streams.py": [f"{UNIT}/training/test_pipeline.py"],
    "dlrm_sharded/training/memory.py": [f"{UNIT}/training/test_memory.py"],
    "dlrm_sharded/training/pipeline.py": [f"{UNIT}/training/test_pipeline.py"],
    "dlrm_sharded/training/prefetch.py": [PREFETCH],
    "dlrm_sharded/training/progress.py": [TRAINING],
    "dlrm_sharded/training/result.py": [TRAINING],
    "dlrm_sharded/training/trainer_config.py": [f"{UNIT}/training/test_trainer.py"],
    "dlrm_sharded/training/window.py": [TRAINING],
}
"""Tests that run all CUDA-only code of a file."""


def test_files_with_cuda_only_code_have_a_test_or_a_trial():
    files = {piece.path for piece in all_pieces(ROOT)}
    named = {*RUN_BY}
    assert sorted(files - named) == [], "name a test in RUN_BY that runs the code on a stand-in"
    assert sorted(named - files) == [], "no CUDA-only code is left"


def test_the_named_tests_run_all_cuda_only_code(tmp_path):
    """What is missing is listed with its place."""
    tests = sorted({test for tests in RUN_BY.values() for test in tests})
    ran = tmp_path / "ran"
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tests.cuda_trace")
    quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # the server has loaded Hydra
    preloaded.run("-m", "pytest", *options, *quiet, f"--cuda-ran={ran}", *tests, exit_code=0)
    found = {*ran.read_text().splitlines()}
    pieces = [piece for piece in all_pieces(ROOT) if piece.path in RUN_BY]
    missing = [str(piece) for piece in pieces if str(piece) not in found]
    assert not missing, "\n".join(missing)


FINDS = {
    "body": ("if device.type == 'cuda':\n    a()\n    b()", ["a()", "b()"]),
    "else": ("if device.type == 'cpu':\n    a()\nelse:\n    b()", ["b()"]),
    "after_return": (
        "def f():\n    if rank.device.type != 'cuda':\n        return\n    a()",
        ["a()"],
    ),
    "nested": (
        "if x.device_type() == 'cuda':\n    for i in b():\n        a(i)",
        ["b()", "a(i)"],
    ),
    "handlers": (
        "if on_cuda:\n    try:\n        a()\n    except E:\n        b()",
        ["a()", "b()"],
    ),
    "expression": ("x = 1 if device.type == 'cuda' else 2", ["1"]),
    "other_expression": ("x = 1 if device.type != 'cuda' else 2", ["2"]),
    "attribute": (
        "class A:\n    def f(self):\n        self._pins = device.type == 'cuda'\n"
        "        if self._pins:\n            a()",
        ["a()"],
    ),
    "and": ("x = on_cuda and a()", ["a()"]),
    "not": ("if not on_cuda:\n    a()\nelse:\n    b()", ["b()"]),
    "or": ("if on_cuda or x:\n    a()", []),
    "use": ("torch.cuda.synchronize()\na()", ["torch.cuda.synchronize()"]),
    "enumeration": (
        "on_device = event.device_type() != DeviceType.CPU\nx = 1 if on_device else 2",
        ["1"],
    ),
    "question": ("if torch.cuda.is_available():\n    a()", ["a()"]),
    "pinned": ("x = batch.pin_memory()", ["x = batch.pin_memory()"]),
    "plan_for_gpus": ("if topology.compute_device == 'cuda':\n    a()", []),
    "dictionary": ("x = {'cpu': 1, 'cuda': 2}[device.type]", []),
}


@pytest.mark.parametrize("name", FINDS)
def test_finds_by_the_text_alone(name: str, tmp_path: Path):
    source, expected = FINDS[name]
    (tmp_path / "module.py").write_text(source)
    assert [piece.text for piece in find_pieces(tmp_path, tmp_path / "module.py")] == expected


def test_traces_expressions_and_threads(tmp_path: Path):
    """A branch of a line that ran is no sign that the other one did."""
    source = """
        import threading

        def choose(on_cuda):
            return [1, 2] if on_cuda else []

        def work(on_cuda):
            if on_cuda:
                print("on the GPU")

        def in_a_thread():
            thread = threading.Thread(target=work, args=(True,))
            thread.start()
            thread.join()
    """
    path = tmp_path / "traced_module.py"
    path.write_text(textwrap.dedent(source))
    pieces = find_pieces(tmp_path, path)
    assert [piece.function for piece in pieces] == ["choose", "work"]
    assert _ran(tmp_path, pieces, "choose(False); work(False)") == []
    assert _ran(tmp_path, pieces, "choose(True)") == ["choose"]
    assert _ran(tmp_path, pieces, "in_a_thread()") == ["work"]


def _ran(root: Path, pieces: list[Piece], calls: str) -> list[str]:
    path = root / pieces[0].path
    names: dict[str, object] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    tracer = Tracer(root, pieces)
    tracer.start()
    try:
        exec(calls, names)
    finally:
        tracer.stop()
    return sorted(piece.function for piece in tracer.ran)
