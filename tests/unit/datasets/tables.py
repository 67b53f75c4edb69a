"""Generates users' files of several forms, with a signal to learn, and encodes them in Python."""

import csv
import gzip
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from omegaconf import OmegaConf

from dlrm_sharded.commands.yamls import option_node
from dlrm_sharded.datasets.columns import keys_of
from dlrm_sharded.datasets.criteo_sample import write_criteo_sample


@dataclass(frozen=True)
class Files:
    """Files of one form, in the order of their rows.

    Args:
        schema: as a yaml says it.
        rows: what the files say, by column.
    """

    paths: list[str]
    schema: dict[str, Any]
    rows: dict[str, list[Any]]


def criteo_files(folder: Path, num_rows: int = 600) -> Files:
    """Write text without a header: a label, 13 integers and 26 hashed strings."""
    path = folder / "criteo.tsv"
    write_criteo_sample(path, num_rows=num_rows)
    schema: Any = OmegaConf.to_container(option_node("data/base", "criteo").schema)
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    columns = zip(*lines, strict=True)
    return Files([str(path)], schema, dict(zip(schema["columns"], map(list, columns), strict=True)))


def click_log(folder: Path, num_rows: int = 600, num_files: int = 3, seed: int = 0) -> Files:
    """Write Parquet with lists of the items that a user saw; all have missing values."""
    rng = np.random.default_rng(seed)
    user, item = rng.zipf(1.6, num_rows) % 200, rng.zipf(1.4, num_rows) % 300
    seen = [(rng.zipf(1.4, length) % 300).tolist() for length in rng.integers(0, 8, num_rows)]
    price, age = rng.lognormal(2, 1, num_rows), rng.integers(18, 80, num_rows)
    weekday = np.arange(num_rows) // 7 % 7
    effects = rng.normal(size=(2, 300))
    logits = effects[0, user] + effects[1, item] + [effects[1, ids].sum() / 3 for ids in seen]
    logits += 0.5 * (np.log1p(price) - 2) + 0.3 * (weekday > 4) - 0.5
    missing = rng.random((3, num_rows)) < 0.1
    rows = {
        "clicked": (rng.random(num_rows) < 1 / (1 + np.exp(-logits))).astype(int).tolist(),
        "session": [f"s{number}" for number in range(num_rows)],
        "user": [None if no else f"user-{one}" for one, no in zip(user, missing[0], strict=True)],
        "item": item.tolist(),
        "seen": [
            None if no else [None if one == 4 else one for one in ids]
            for ids, no in zip(seen, missing[1], strict=True)
        ],
        "price": price.tolist(),
        "age": [None if no else one for one, no in zip(age.tolist(), missing[2], strict=True)],
        "weekday": weekday.tolist(),
    }
    schema = {
        "label": "clicked",
        "key": ["session"],
        "dense": {
            "price": {"log": True, "standardize": True},
            "age": {"fill": 40.0, "clip": [20, 60]},
        },
        "categorical": {
            "seen": {"table": "item", "longest": 5},
            "user": {"dim": 8, "rows": 30},
            "item": {"min_count": 3},
            "weekday": {"ids": "as_is", "rows": 7},
        },
    }
    paths = _write(folder, "clicks", rows, num_files, ".parquet", pl.DataFrame.write_parquet)
    return Files(paths, schema, rows)


def wide_log(folder: Path, num_rows: int = 600, num_files: int = 2, num_columns: int = 60) -> Files:
    """Write compressed CSV with many columns of all kinds, lists among them."""
    rng = np.random.default_rng(num_columns)
    logits, rows = rng.normal(0, 0.1, num_rows) - 1, {}
    dense: dict[str, Any] = {}
    categorical: dict[str, Any] = {}
    missing = rng.random((num_columns, num_rows)) < 0.05
    for number in range(num_columns):
        ids = rng.zipf(1.5, num_rows) % 50
        logits += rng.normal(size=50)[ids] * (number < 12) / 3
        name = ["count", "ratio", "word", "code, hashed", "tags"][number % 5] + f" {number}"
        match number % 5:
            case 0:
                dense[name] = {"log": True, "standardize": number % 2 == 0}
                values = [str(one) for one in ids]
            case 1:
                dense[name] = {"clip": [None, 0.5], "standardize": number % 2 == 0}
                values = [repr(one) for one in (ids / 50).tolist()]
            case 2:
                categorical[name] = None if number < 20 else {"table": "word 2", "min_count": 4}
                values = [f'größe "{one}", {one % 3}' for one in ids]
            case 3:
                categorical[name] = {"ids": "hash", "rows": 20}
                values = [f"{one * 7919:08x}" for one in ids]
            case _:
                categorical[name] = {"split": "|", "longest": 2 + number % 3}
                values = [
                    "|".join(f"t{one - k}" if k != 2 else "" for k in range(one % 6)) for one in ids
                ]
        no = missing[number]
        rows[name] = ["" if gone else one for one, gone in zip(values, no, strict=True)]
    rows["y"] = [str(int(one)) for one in rng.random(num_rows) < 1 / (1 + np.exp(-logits))]
    schema = {"label": "y", "min_count": 2, "dense": dense, "categorical": categorical}

    def write(frame: pl.DataFrame, path: Path) -> None:
        with gzip.open(path, "wt", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(frame.columns)
            writer.writerows(frame.rows())

    return Files(_write(folder, "wide", rows, num_files, ".csv.gz", write), schema, rows)


def _write(
    folder: Path,
    name: str,
    rows: Mapping[str, Sequence[Any]],
    num_files: int,
    ending: str,
    write: Callable[[pl.DataFrame, Path], Any],
) -> list[str]:
    frame = pl.DataFrame(rows)
    bounds = np.linspace(0, len(frame), num_files + 1).astype(int)
    paths = []
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        paths.append(str(folder / f"{name}-{number}{ending}"))
        write(frame[begin:end], Path(paths[-1]))
    return paths


def expected_samples(
    rows: Mapping[str, Sequence[Any]], schema: Mapping[str, Any], num_train: int
) -> tuple[np.ndarray, dict[str, list[list[int]]]]:
    """Return dense features [n, num_dense], and the ids of each sample by feature.

    It says again what the package does, value by value.
    """
    dense = [_dense(rows[name], one or {}, num_train) for name, one in schema["dense"].items()]
    columns = {name: one or {} for name, one in schema["categorical"].items()}
    texts = {name: [_texts(v, one) for v in rows[name]] for name, one in columns.items()}
    ids: dict[str, list[list[int]]] = {}
    for table in {one.get("table", name): None for name, one in columns.items()}:
        names = [name for name, one in columns.items() if one.get("table", name) == table]
        options = {key: value for name in names for key, value in columns[name].items()}
        row_of = _row_of([texts[name][:num_train] for name in names], options, schema)
        for name in names:
            ids[name] = [[row_of(text) for text in sample] for sample in texts[name]]
    return np.stack(dense, axis=1), ids


def _dense(values: Sequence[Any], options: Mapping[str, Any], num_train: int) -> np.ndarray:
    found = []
    for value in values:
        number = options.get("fill") if value in (None, "") else float(value)
        if number is not None:
            low, high = options.get("clip") or (None, None)
            number = number if low is None else max(number, low)
            number = number if high is None else min(number, high)
            number = np.log1p(max(number, 0)) if options.get("log") else number
        found.append(np.nan if number is None else number)
    numbers = np.array(found)
    if options.get("standardize"):
        train = numbers[:num_train]
        numbers = (numbers - np.nanmean(train)) / np.nanstd(train)
    return np.where(np.isnan(numbers), 0, numbers)


def _texts(value: Any, options: Mapping[str, Any]) -> list[str]:
    """Return the texts of a sample's ids; an empty one is missing."""
    if "longest" not in options:
        return ["" if value is None else str(value)]
    parts = (value or "").split(options["split"]) if "split" in options else value or []
    return [str(part) for part in parts if part not in (None, "")][: options["longest"]]


def _key(text: str) -> int:
    return int(keys_of(pl.Series([text]))[0])


def _row_of(
    columns: Sequence[Sequence[Sequence[str]]],
    options: Mapping[str, Any],
    schema: Mapping[str, Any],
) -> Callable[[str], int]:
    """Return the function from a text to its row in the table of some columns."""
    kind, rows = options.get("ids", "vocabulary"), options.get("rows")
    if kind == "as_is":
        return int
    if kind == "hash":
        return lambda text: _key(text) % (rows - 1) + 1 if text else 0
    counts = Counter(text for column in columns for sample in column for text in sample if text)
    least = options.get("min_count", schema.get("min_count", 2))
    while rows and sum(count >= least for count in counts.values()) > rows - 2:
        least += 1
    kept = sorted((text for text, count in counts.items() if count >= least), key=_key)
    place = {text: number + 2 for number, text in enumerate(kept)}
    return lambda text: place.get(text, 1) if text else 0
