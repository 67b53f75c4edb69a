"""Tests run on the CPU, with gloo, whatever the machine has; those marked gpu say otherwise."""

import atexit
import gc
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import settings

from tests import hidden_gpus, preloaded
from tests.preloaded import ROOT as ROOT

SMALL_RUN = [
    *("batch_size=256", "trainer.num_steps=12", "trainer.log_every_steps=4"),
    *("data.max_rows=500", "data.num_train_batches=24", "data.num_val_batches=4"),
    *("measure.iterations=4", "measure.warmup=1"),
]
hidden_gpus.hide()
os.environ.pop("DLRM_SHARDED_DEVICE", None)  # the Makefile's choice
if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker has the folder of the process that began it
    _cache = tempfile.TemporaryDirectory(prefix="dlrm_sharded-cache-")
    atexit.register(_cache.cleanup)
    os.environ["DLRM_SHARDED_CACHE"] = _cache.name
# Commands that tests start are those of this checkout, wherever the package is installed from.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "launch")])

# What one run measures would change the plan of the next.
os.environ["DLRM_SHARDED_JOURNAL"] = "none"

# Only tests of the first measurement make one; others would wait, and plan by this machine's load.
os.environ["DLRM_SHARDED_CALIBRATE"] = "never"

# Examples take as long as the machine takes: slow is not wrong.
for _name, _number in {"quick": 20, "all": 100, "soak": 500}.items():
    settings.register_profile(_name, max_examples=_number, deadline=None)
settings.load_profile("quick")

NOT_RUN = pytest.StashKey[Counter[str]]()
"""Number of deselected tests by folder; xdist's workers send theirs to the process above them."""


def pytest_configure(config: pytest.Config) -> None:
    """Begin to load the libraries for the processes that tests of all workers start."""
    if config.getoption("numprocesses", None):  # this is the process above the workers
        os.environ[preloaded.SHARED] = str(preloaded.start_server())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that no worker is left with one of them at the end."""
    folders = ("slurm", "launch", "e2e", "contract", "browser", "gpu", "distributed")
    place = {name: number for number, name in enumerate(folders)}
    items.sort(key=lambda item: place.get(item.path.parent.name, len(folders)))


def pytest_deselected(items: list[pytest.Item]) -> None:
    found = Counter(item.path.relative_to(ROOT / "tests").parts[0] for item in items)
    items[0].config.stash.setdefault(NOT_RUN, Counter()).update(found)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what a worker deselected; all of them deselect the same."""
    if "not_run" in getattr(node, "workeroutput", {}):
        node.config.stash[NOT_RUN] = Counter(node.workeroutput["not_run"])


@pytest.hookimpl(wrapper=True, tryfirst=True)  # what is written last is at the very end
def pytest_sessionfinish(session: pytest.Session) -> Any:
    """End with a line on what was not run: deselected tests, and those that lack something here."""
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["not_run"] = dict(config.stash.get(NOT_RUN, Counter()))
    result = yield
    deselected = config.stash.get(NOT_RUN, Counter())
    if reporter := config.pluginmanager.get_plugin("terminalreporter"):
        skipped = reporter.stats.get("skipped", [])
        reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
        parts = [f"{number} skipped ({reason})" for reason, number in reasons.most_common()]
        if deselected:
            folders = ", ".join(f"{name} {number}" for name, number in sorted(deselected.items()))
            parts.insert(0, f"{deselected.total()} deselected ({folders}); make test-all runs all")
        reporter.write_line(f"not run: {'; '.join(parts) or 'nothing'}")
    return result


def pytest_collection_finish() -> None:
    """Spare the garbage collector the objects of the imports, 0.3 s at each end of a job."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    """Give each test the levels and handlers of a new process: a command's `main` sets others."""
    handlers = logging.root.handlers[:]
    levels = {name: logging.getLogger(name).level for name in (None, "dlrm_sharded")}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    logging.root.handlers[:] = handlers


@pytest.fixture(scope="session")
def finished_sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two sharders with two seeds each, small, as a user starts it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the workers have one sweep
    sweep, output = folder / "sweep", folder / "sweep" / "output.txt"
    with FileLock(folder / "sweep.lock"):
        if not output.exists():
            done = preloaded.run(
                *("-m", "dlrm_sharded.train", "-m", "seed=0,1", "sharder=random,size_lookup"),
                *(*SMALL_RUN, f"hydra.sweep.dir={sweep}"),
            )
            assert done.returncode == 0, done.stdout + done.stderr
            output.write_text(done.stdout)
    return sweep
