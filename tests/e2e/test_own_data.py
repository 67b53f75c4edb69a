"""A user's own files: inspected, trained, evaluated and scored by commands alone."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
import yaml
from filelock import FileLock
from torch import tensor
from torchmetrics.functional.classification import binary_auroc

from dlrm_sharded import load_exported
from tests import preloaded
from tests.e2e.runs import environment, result_of, script, train_alone
from tests.unit.datasets.tables import Files, click_log, criteo_files, wide_log

NUM_USERS, NUM_ITEMS = 60, 40
SMALL = ("batch_size=128", "measure.iterations=2", "measure.warmup=1", "sharder=size")


def clicks(num_rows: int, seed: int) -> pl.DataFrame:
    """A click log whose labels follow from the user, the items of a list, and the price."""
    effects, draw = np.random.default_rng(0), np.random.default_rng(seed)
    of_user, of_item = effects.normal(size=NUM_USERS), effects.normal(size=NUM_ITEMS)
    user, item = draw.integers(0, NUM_USERS, num_rows), draw.integers(0, NUM_ITEMS, num_rows)
    seen = [draw.integers(0, NUM_ITEMS, count) for count in draw.integers(0, 4, num_rows)]
    price = np.exp(draw.normal(size=num_rows))
    logits = 1.5 * of_user[user] + of_item[item] + np.log(price)
    return pl.DataFrame(
        {
            "row_id": [f"{seed}-{row}" for row in range(num_rows)],
            "clicked": (draw.random(num_rows) < 1 / (1 + np.exp(-logits))).astype(int),
            "user": [f"u{one}" for one in user],
            "item_id": item,
            "seen": [ids.tolist() for ids in seen],
            "price": price,
        }
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files, their schema, and a run that is trained on them."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "clicks").mkdir()
    for number in range(3):
        clicks(2000, number).write_parquet(folder / f"clicks/part-{number}.parquet")
    clicks(700, 9).write_parquet(folder / "held_out-0.parquet")
    clicks(333, 10).write_parquet(folder / "held_out-1.parquet")
    script("data", folder, "inspect", "clicks")
    schema = (folder / "schema.yaml").read_text()
    assert "key: [row_id]" in schema
    train_alone(
        folder / "run",
        *SMALL,
        *("data=table", f"data.files={folder / 'clicks'}", f"data.schema={folder / 'schema.yaml'}"),
        *("trainer.num_epochs=6", "trainer.eval_every_steps=40"),
    )
    return folder


def evaluate(folder: Path, *words: str, ranks: int = 1, exit_code: int = 0) -> preloaded.Ended:
    if ranks == 1:
        return script("evaluate", folder, "run", *words, exit_code=exit_code)
    module = ["-m", "dlrm_sharded.commands.evaluate", "run", *words]
    launcher = ["-m", "dlrm_sharded.ranks.torchrun", "--nproc-per-node", str(ranks)]
    return preloaded.run(*launcher, *module, cwd=folder, env=environment(), exit_code=exit_code)


def test_scores_and_metrics_are_those_of_the_rows(trained: Path) -> None:
    done = evaluate(trained, "data.files=held_out-*.parquet", "scores=scores.parquet")
    assert "1,033 rows" in done.stdout
    held_out = pl.read_parquet(trained / "held_out-*.parquet")
    scores = pl.read_parquet(trained / "scores.parquet")
    assert scores["row_id"].to_list() == held_out["row_id"].to_list()
    metrics = json.loads((trained / "metrics.json").read_text())
    labels, found = tensor(held_out["clicked"].to_numpy()), tensor(scores["score"].to_numpy())
    assert metrics["auroc"] == pytest.approx(float(binary_auroc(found, labels)), abs=1e-6)
    assert metrics["calibration"] == pytest.approx(float(found.mean() / labels.float().mean()))
    assert metrics["auroc"] > 0.7
    assert (metrics["num_rows"], metrics["num_malformed"]) == (1033, 0)
    assert set(metrics["unseen_share"]) == {"user", "item_id", "seen"}
    assert not list(trained.glob("*.partial"))


def test_the_validation_rows_have_the_metrics_of_the_training(trained: Path) -> None:
    pl.read_parquet(trained / "clicks/part-2.parquet").tail(600).head(512).write_parquet(
        trained / "validation.parquet"
    )
    evaluate(trained, "data.files=validation.parquet", "out=of_validation.json")
    metrics, result = json.loads((trained / "of_validation.json").read_text()), None
    result = result_of(trained / "run")
    for key in ("auroc", "normalized_entropy"):
        assert metrics[key] == pytest.approx(result[key], abs=1e-6)


def hashed_lists(folder: Path) -> Files:
    """A click log of nothing but hashed lists, all of whose rows are clicks."""
    made = click_log(folder)
    rows = made.rows | {"clicked": [1] * len(made.rows["clicked"])}
    path = folder / "hashed.parquet"
    pl.DataFrame(rows).write_parquet(path)
    column = {"ids": "hash", "rows": 50, "longest": 3}
    return Files([str(path)], {"label": "clicked", "categorical": {"seen": column}}, rows)


@pytest.mark.slow
@pytest.mark.parametrize("form", [criteo_files, click_log, wide_log, hashed_lists])
def test_metrics_scores_and_exported_model_agree_on_every_row(
    form: Callable[[Path], Files], tmp_path: Path
) -> None:
    made = form(tmp_path)
    (tmp_path / "schema.yaml").write_text(yaml.safe_dump(made.schema))
    files = f"data.files=[{','.join(made.paths)}]"
    train_alone(
        tmp_path / "run",
        *SMALL,
        *("data=table", files, f"data.schema={tmp_path / 'schema.yaml'}", "trainer.num_epochs=2"),
        *("data.val_share=0.3", "model.dense_layers=[16,8]", "model.over_layers=[16,1]"),
    )
    evaluate(tmp_path, files, "scores=scores.parquet", "batch_size=100")
    script("export", tmp_path, "run", "out=model")
    scores = tensor(pl.read_parquet(tmp_path / "scores.parquet")["score"].to_numpy())
    found = load_exported(tmp_path / "model")(pl.DataFrame(made.rows))
    assert (scores - found).abs().max() < 1e-6
    assert scores.std() > 1e-4
    labels = tensor([float(label) for label in made.rows[made.schema["label"]]])
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    loss = torch.nn.functional.binary_cross_entropy(scores.double(), labels.double())
    assert metrics["loss"] == pytest.approx(float(loss), abs=1e-5)
    if 0 < labels.mean() < 1:
        expected = float(binary_auroc(scores, labels.int()))
        assert metrics["auroc"] == pytest.approx(expected, abs=1e-6)
    else:
        assert metrics["auroc"] is None


@pytest.mark.slow
def test_ranks_and_interruptions_change_nothing(trained: Path) -> None:
    files = ("data.files=[held_out-0.parquet,held_out-1.parquet]",)
    evaluate(trained, *files, "scores=alone.parquet")
    expected = pl.read_parquet(trained / "alone.parquet")
    for ranks in (2, 3):
        evaluate(trained, *files, f"scores=ranks-{ranks}.parquet", ranks=ranks)
        found = pl.read_parquet(trained / f"ranks-{ranks}.parquet")
        assert found["row_id"].equals(expected["row_id"])
        assert np.allclose(found["score"], expected["score"], atol=1e-6)


def test_without_labels_rows_are_only_scored(trained: Path) -> None:
    new = clicks(50, 11).drop("clicked").with_columns(user=pl.lit("somebody new"))
    new.write_parquet(trained / "new.parquet")
    done = evaluate(trained, "data.files=new.parquet", exit_code=2)
    assert "scores=FILE.parquet" in done.stderr
    evaluate(trained, "data.files=new.parquet", "scores=new_scores.parquet")
    assert not (trained / "new_scores.json").exists()
    evaluate(trained, "data.files=new.parquet", "scores=new_scores.parquet", "out=new.json")
    assert pl.read_parquet(trained / "new_scores.parquet")["score"].is_between(0, 1).all()
    metrics = json.loads((trained / "new.json").read_text())
    assert metrics["unseen_share"]["user"] == 1
    assert "auroc" not in metrics


def test_rows_that_cannot_be_used_are_left_out_of_the_scores(trained: Path) -> None:
    rows = clicks(5, 12).with_columns(price=pl.Series([1.0, float("inf"), 2.0, 3.0, None]))
    rows.write_parquet(trained / "odd-0.parquet")
    rows.head(0).write_parquet(trained / "odd-1.parquet")
    rows.head(1).write_parquet(trained / "odd-2.parquet")
    share = "max_malformed_share=0.5"
    files = "data.files=[odd-0.parquet,odd-1.parquet,odd-2.parquet]"
    done = evaluate(trained, files, "scores=odd.parquet", "out=odd.json", share, "batch_size=3")
    assert "row 2: price is inf" in done.stderr
    scores = pl.read_parquet(trained / "odd.parquet")
    assert scores["row_id"].to_list() == ["12-0", "12-2", "12-3", "12-4", "12-0"]
    assert scores["score"][0] == pytest.approx(scores["score"][4], abs=1e-6)
    assert json.loads((trained / "odd.json").read_text())["num_malformed"] == 1


def test_a_damaged_checkpoint_is_passed_over(trained: Path, tmp_path: Path) -> None:
    for step in (1, 2):
        (checkpoint,) = (trained / "run/checkpoints").glob("step-*")
        shutil.copytree(checkpoint, tmp_path / f"run/checkpoints/step-{step:010}")
    largest = max(checkpoint.rglob("*"), key=lambda path: path.stat().st_size).name
    for path in (tmp_path / "run/checkpoints/step-0000000002").rglob(largest):
        path.write_bytes(b"damaged")
    files = f"data.files={trained / 'held_out-0.parquet'}"
    done = script("evaluate", tmp_path, "run", files, "out=new/folder/metrics.json")
    assert "skipped a checkpoint" in done.stderr
    metrics = json.loads((tmp_path / "new/folder/metrics.json").read_text())
    assert metrics["checkpoint"].endswith("step-0000000001")


@pytest.mark.slow
def test_a_scoring_that_is_killed_goes_on(trained: Path) -> None:
    for number in range(6):
        clicks(4000, 30 + number).write_parquet(trained / f"long-{number}.parquet")
    words = ["run", "data.files=long-*.parquet", "batch_size=64"]
    evaluate(trained, *words[1:], "scores=whole.parquet", "out=whole.json")
    command = [sys.executable, "-m", "dlrm_sharded.commands.evaluate", *words]
    command += ["scores=killed.parquet", "out=killed.json"]
    for seconds in np.linspace(3, 9, 10):
        process = subprocess.Popen(
            command, cwd=trained, env=environment(), stderr=subprocess.DEVNULL
        )
        try:
            process.wait(float(seconds))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    evaluate(trained, *words[1:], "scores=killed.parquet", "out=killed.json")
    killed, whole = (pl.read_parquet(trained / f"{name}.parquet") for name in ("killed", "whole"))
    assert killed["row_id"].equals(whole["row_id"])
    assert np.allclose(killed["score"], whole["score"], atol=1e-6)
    assert not list(trained.glob("*.partial"))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("data.files=nothing.parquet",), "is no file"),
        (("data.files=held_out-0.parquet", "data.blocks_dir=clicks"), "does not exist"),
        ((), "give one run or checkpoint"),
        (("data.files=held_out-0.parquet", "batch_size=many"), "batch_size is 'many'; it must be"),
        (
            ("data.files=held_out-0.parquet", "data.blocks_dir=5"),
            "data.blocks_dir is 5; it must be",
        ),
        (("data.files=held_out-0.parquet", "scores=held_out-0.parquet"), "name the same file"),
        (("data.files=held_out-0.parquet", "scores=a", "out=./a"), "name the same file"),
    ],
)
def test_says_what_cannot_be_evaluated(trained: Path, words: tuple[str, ...], reason: str) -> None:
    done = evaluate(trained, *words, exit_code=2)
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(trained.glob("*.partial"))


def test_a_file_that_another_command_writes_is_refused(trained: Path) -> None:
    words = ("data.files=held_out-0.parquet", "scores=twice.parquet")
    with FileLock(trained / "twice.parquet.lock"):
        done = evaluate(trained, *words, exit_code=2)
    assert "writes twice.parquet; wait for its end, or name another" in done.stderr
    evaluate(trained, *words)
    assert not (trained / "twice.parquet.lock").exists()


def test_blocks_of_other_rows_are_refused(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "clicks", tmp_path / "clicks")
    clicks(500, 20).write_parquet(tmp_path / "clicks/part-0.parquet")
    shutil.copy(trained / "schema.yaml", tmp_path)
    script(
        "data", tmp_path, "convert", "clicks", "schema=schema.yaml", "val_share=0.5", "out=other"
    )
    words = ("data.files=held_out-0.parquet", f"data.blocks_dir={tmp_path / 'other'}")
    done = evaluate(trained, *words, exit_code=2)
    assert "converted again" in done.stderr
