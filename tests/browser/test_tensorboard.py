"""What TensorBoard shows of a finished sweep, tab by tab, as a browser renders it."""

from decimal import Decimal
from statistics import mean
from typing import Any
from urllib.parse import quote

import pytest
import torch
from playwright.sync_api import Page

from tests.browser.page import CHROMIUM, WIDTH, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH"),
]

Results = dict[str, dict[str, Any]]

COMPARISON = "comparison"
"""The run that compares the others."""

RESULT_OF_CARD = {
    "embedding/cost_ms": "embedding_cost_ms",
    "embedding/imbalance": "imbalance",
    "eval/auroc": "auroc",
    "train/loss": "loss",
}
RESULT_OF_METRIC = {
    "embedding cost, ms": "embedding_cost_ms",
    "samples/s": "samples_per_s",
    "AUROC": "auroc",
}
RESULT_OF_COLUMN = {
    "embedding cost, ms": "embedding_cost_ms",
    "imbalance": "imbalance",
    "samples/s": "samples_per_s",
}

RUN_LIST = "deep.all('runs-data-table tb-data-table-content-row').map((row) => deep.text(row))"
CARDS = """Object.fromEntries(deep.all('card-view').map((card) => [
  deep.all('.tag', card).map((tag) => deep.text(tag).replaceAll('\\n', '')).join(),
  Object.fromEntries(
    deep.all('tb-data-table-content-row', card).map((row) => deep.text(row).split('\\n'))
  ),
]))"""
TABLES = """deep.all('table').map(
  (table) => [...table.rows].map((row) => [...row.cells].map((cell) => deep.text(cell)))
)"""
TITLE_ENDS = """Object.fromEntries(
  deep.all('thead th').map((title) => [deep.text(title), title.getBoundingClientRect().right])
)"""
IMAGES = """deep.all('tf-image-loader').map((loader) => [
  ...deep.text(loader).split('\\n').slice(0, 2),
  deep.all('img', loader.shadowRoot).some((image) => image.naturalWidth > 0),
])"""


def test_time_series(page, tensorboard, results):
    """All runs are listed, and each has its figure on the cards."""
    tags = quote(f"^({'|'.join(RESULT_OF_CARD)})$")
    page.goto(f"{tensorboard}?darkMode=false&smoothing=0&tagFilter={tags}#timeseries")
    wait_for(page, RUN_LIST, lambda runs: sorted(runs) == sorted([*results, COMPARISON]))
    cards = wait_for(
        page,
        CARDS,
        lambda cards: all(cards.get(tag, {}).keys() == results.keys() for tag in RESULT_OF_CARD),
    )
    for tag, key in RESULT_OF_CARD.items():
        for run, value in cards[tag].items():
            assert results[run][key] == shown_as(value), (run, tag)


def test_hparams(page, tensorboard, results):
    """All columns are on a page of usual width."""
    for run, trial in hparams(page, tensorboard, results).items():
        assert trial["sharder"] == results[run]["sharder"]
        assert trial["seed"] == str(results[run]["seed"])
        for title, key in RESULT_OF_METRIC.items():
            assert results[run][key] == shown_as(trial[title]), (run, title)
    ends = page.evaluate(TITLE_ENDS)
    assert {"sharder", *RESULT_OF_METRIC} <= ends.keys()
    assert [title for title, end in ends.items() if end > WIDTH] == []


@pytest.mark.parametrize("shown", ["runs", "comparison"])
def test_images(page, tensorboard, results, shown):
    """Each is loaded, and stands below the name of its run."""
    if shown == "runs":
        tags, runs = {"plan/cost_by_rank", "plan/memory_by_rank"}, [*results]
    else:
        names = ("embedding_cost", "imbalance", "throughput", "cost_and_throughput")
        tags, runs = {f"comparison/{name}" for name in names}, [COMPARISON]
    only = quote(f"^({'|'.join(sorted(tags))})$")
    page.goto(f"{tensorboard}?darkMode=false#images&tagFilter={only}")
    expected = {(tag, run, True) for tag in tags for run in runs}
    wait_for(page, IMAGES, lambda images: expected <= {tuple(image) for image in images})


def test_comparison_table(page, tensorboard, results):
    """One row a sharder, with the means over its runs."""
    page.goto(f"{tensorboard}?darkMode=false#text&tagFilter={quote('^comparison/summary')}")
    tables = wait_for(page, TABLES, lambda tables: rows_with(tables, "samples/s"))
    rows = {row["sharder"]: row for row in rows_with(tables, "samples/s")}
    assert rows.keys() == {result["sharder"] for result in results.values()}
    for sharder, row in rows.items():
        runs = [result for result in results.values() if result["sharder"] == sharder]
        assert row["runs"] == f"{len(runs)} / {len(runs)}"
        for title, key in RESULT_OF_COLUMN.items():
            assert mean(run[key] for run in runs) == shown_as(row[title].split()[0]), title


def hparams(page: Page, tensorboard: str, results: Results) -> dict[str, dict[str, str]]:
    """Cells of the HParams table, by the run's name and the column's title."""
    page.goto(f"{tensorboard}?darkMode=false#hparams")

    def trials(tables: list[list[list[str]]]) -> dict[str, dict[str, str]]:
        rows = [row for row in rows_with(tables, "Trial ID") if all(map(row.get, RESULT_OF_METRIC))]
        return {run: row for row in rows for run in results if run in row["Trial ID"].split("/")}

    return trials(wait_for(page, TABLES, lambda tables: trials(tables).keys() == results.keys()))


def rows_with(tables: list[list[list[str]]], title: str) -> list[dict[str, str]]:
    """Cells by title, of the table that has such a column; none where no table has."""
    for titles, *rows in filter(None, tables):
        if title in titles:
            return [dict(zip(titles, row, strict=False)) for row in rows]
    return []


def shown_as(text: str) -> Any:
    """Equals the numbers that, stored in 32 bits as TensorBoard stores them, round to this text."""
    number = Decimal(text.replace(",", ""))
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int), text
    stored = float(number) * torch.finfo(torch.float32).eps
    return pytest.approx(float(number), abs=0.5 * 10**exponent + abs(stored))
