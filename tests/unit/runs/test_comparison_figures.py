"""What a comparison leaves: files, and a run that TensorBoard reads."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from dlrm_sharded.commands import report as command
from dlrm_sharded.plans.plan_cost import STAGES
from dlrm_sharded.runs import compare_sweep
from dlrm_sharded.runs.comparison import Comparison, summarize
from dlrm_sharded.runs.comparison_figures import comparison_figures, write_comparison
from dlrm_sharded.runs.run_folder import find_runs
from tests.unit.runs.test_run_events import read


def write_run(folder: Path, *overrides: str, scale: float = 1.0, ranks: int = 2) -> None:
    """A run whose rank 0 is the slowest, with 10 ms x scale."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text("".join(f"- {o}\n" for o in overrides))
    stages = dict(zip(STAGES, (4.0, 2.0, 1.0, 3.0), strict=True))
    fields: dict[str, Any] = {
        "world_size": ranks,
        "device": "cpu: test",
        "embedding_cost_ms": 10.0 * scale,
        "stages_ms": {stage: ms * scale for stage, ms in stages.items()},
        "per_rank": [
            {f"{stage}_ms": ms * scale / (1 + rank) for stage, ms in stages.items()}
            for rank in range(ranks)
        ],
        "imbalance": 1.25 * scale,
        "samples_per_s": 1000.0 / scale,
    }
    (folder / "result.json").write_text(json.dumps(fields))


def write_sweep(folder: Path) -> Path:
    """Two sharders, two seeds; one run failed, and one sharder has none that succeeded."""
    write_run(folder / "random_0", "sharder=random", "seed=0", scale=2.0)
    write_run(folder / "random_1", "sharder=random", "seed=1", scale=3.0)
    write_run(folder / "dim_2", "sharder=dim", "seed=0")
    jobs = [
        {"folder": "dim_3", "overrides": ["sharder=dim", "seed=1"], "state": "failed"},
        {"folder": "size_4", "overrides": ["sharder=size", "seed=0"], "state": "cancelled"},
    ]
    (folder / "sweep.json").write_text(json.dumps({"jobs": jobs}))
    return folder


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return write_sweep(tmp_path / "sweep")


@pytest.fixture(scope="module")
def compared_sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A sweep's folder after its comparison, which takes a second, and what that returned."""
    folder = write_sweep(tmp_path_factory.mktemp("compared") / "sweep")
    return folder, compare_sweep(folder)


def compared(folder: Path) -> Comparison:
    return summarize(*find_runs([folder]))


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def ends(figure: Figure) -> list[float]:
    """Where the last part of each bar ends."""
    last = [bars for bars in figure.axes[0].containers if hasattr(bars, "patches")][-1]
    return [bar.get_x() + bar.get_width() for bar in last.patches]


def test_a_sweep_is_compared_in_its_own_folder(compared_sweep):
    sweep, table = compared_sweep
    assert "dim_3: failed: no reason known (no log)" in table
    assert str(sweep / "summary.md") in table
    assert (sweep / "summary.md").read_text().startswith("# Comparison of runs\n\n- 5 runs, 3 succ")
    rows = {row["sharder"]: row for row in rows_of(sweep / "summary.csv")}
    assert list(rows) == ["random", "dim", "size"]
    assert float(rows["random"]["embedding_cost_ms_mean"]) == pytest.approx(25.0)
    assert float(rows["dim"]["time_over_random"]) == pytest.approx(0.5)
    assert (rows["dim"]["succeeded"], rows["dim"]["runs"]) == ("1", "2")
    runs = [row["run"] for row in rows_of(sweep / "runs.csv")]
    assert sorted(runs) == ["dim_2", "dim_3", "random_0", "random_1", "size_4"]


def test_tensorboard_reads_it(compared_sweep):
    sweep, _ = compared_sweep
    events = read(sweep / "comparison")
    assert set(events.Tags()["images"]) == {
        *(f"comparison/{name}" for name in ("embedding_cost", "throughput", "imbalance")),
        "comparison/relative_throughput",
        "comparison/cost_and_throughput",
    }
    (text,) = events.Tensors("comparison/summary/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert (sweep / "summary.md").read_text().endswith(shown)


def test_again_replaces_its_own_file_only(tmp_path):
    write_run(tmp_path / "run", "sharder=dim")
    write_run(tmp_path / "long", "sharder=dim", f"data.path={'x' * 300}")
    comparison, folder = compared(tmp_path), tmp_path / "comparison"
    other = folder / "events.out.tfevents.1.host.1.0"
    folder.mkdir()
    other.touch()
    for _ in range(2):
        write_comparison(comparison, folder)
        files = {path.name for path in folder.iterdir()}
        assert other.name in files
        assert len({name for name in files if not name.endswith(".png")}) == 2
        assert len([name for name in files if name.startswith("comparison.throughput.")]) == 2
    assert len(read(folder).Images("comparison/throughput/-")) == 1


def test_bars(sweep):
    figures = comparison_figures(compared(sweep))
    cost = figures["comparison/embedding_cost"]
    labels = [label.get_text() for label in cost.axes[0].get_yticklabels()]
    assert labels == ["random", "dim (1/2)", "size (0/1)"]
    assert ends(cost) == pytest.approx([25.0, 10.0, 0.0])
    stages = [bars for bars in cost.axes[0].containers if hasattr(bars, "patches")]
    widths = [[bar.get_width() for bar in stage.patches] for stage in stages]
    assert widths == [pytest.approx([ms * 2.5, ms, 0.0], abs=1e-9) for ms in (4.0, 2.0, 1.0, 3.0)]
    texts = [text.get_text() for text in cost.axes[0].texts]
    assert texts == ["25.00", "10.00", "unknown"]
    assert ends(figures["comparison/imbalance"]) == pytest.approx([3.125, 1.25, 1.0])
    assert figures["comparison/imbalance"].axes[0].get_xlim()[0] == 1.0
    throughput = figures["comparison/throughput"]
    assert ends(throughput) == pytest.approx([1000 * (1 / 2 + 1 / 3) / 2, 1000.0, 0.0])


@pytest.mark.parametrize("words", [[], ["out=there/it"]], ids=["comparison", "there/it"])
def test_the_command(words, sweep, monkeypatch, run_command, request):
    monkeypatch.chdir(sweep.parent)
    out = request.node.callspec.id
    done = run_command(command.main, "sweep/random_0", "sweep/dim_2", *words)
    assert (done.returncode, done.stdout.split()[0]) == (0, "sharder")
    assert f"{out}/summary.md" in done.stdout
    assert len(rows_of(sweep.parent / out / "runs.csv")) == 2
    assert (sweep.parent / out / "comparison").is_dir()


def test_the_command_ends_with_2_and_one_message(tmp_path, run_command):
    done = run_command(command.main, tmp_path / "missing")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "missing is not a folder" in line
    assert not (tmp_path / "missing").exists()
