"""The encoder of a training run, which turns columns of files into dense features and table rows.

It is made by reading the training rows once. Evaluation, prediction and exported models then use
it, too, so that all of them encode a row in the same way. Its folder holds:
    encoder.json             schema, means and deviations, version
    vocabulary-00000.npy     the keys of a table's rows, in the order of the schema's tables
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dlrm_sharded.datasets.columns import ParsedRows
from dlrm_sharded.datasets.schema import Schema, TableOptions
from dlrm_sharded.datasets.vocabulary import RARE_ROW, Vocabulary
from dlrm_sharded.files.json_files import read_json_object, write_json
from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.files.limited import Finite, NonNegative

FILE_NAME = "encoder.json"


@dataclass(frozen=True, slots=True)
class Figures:
    """Mean and standard deviation of a dense column's values in the training rows."""

    mean: Finite
    deviation: NonNegative


@dataclass(frozen=True, slots=True)
class _Form:
    """The form of encoder.json."""

    version: Literal[1]
    schema: Schema
    figures: Mapping[str, Figures]


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """n samples as a model takes them, for F1 features of one id and F2 of lists.

    Args:
        labels: [n] of 0 and 1.
        dense: [n, num_dense].
        ids: [F1, n], table rows.
        lengths: [F2, n], numbers of ids.
        values: F2 arrays [sum of the lengths] of table rows.
        num_rare: by column, number of ids that are rare or unseen in the training rows.
    """

    labels: npt.NDArray[np.uint8]
    dense: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    values: tuple[npt.NDArray[np.int32], ...]
    num_rare: dict[str, int]


class ColumnEncoder:
    """Encodes parsed rows.

    Args:
        figures: means and deviations of the columns to standardize, by column.
        vocabularies: by table, for the tables that have one.
    """

    def __init__(
        self, schema: Schema, figures: Mapping[str, Figures], vocabularies: Mapping[str, Vocabulary]
    ) -> None:
        self.schema = schema
        self._figures = figures
        self._vocabularies = vocabularies
        self._tables = schema.tables()
        columns = schema.categorical_columns
        self.single = tuple(name for name, column in columns.items() if column.longest is None)
        self.lists = tuple(name for name, column in columns.items() if column.longest is not None)

    def num_embeddings(self) -> dict[str, int]:
        """Return the number of rows of each table."""
        return {name: self._rows(table) for name, table in self._tables.items()}

    def encode(self, rows: ParsedRows) -> EncodedRows:
        """Encode samples; faults are left to the caller."""
        num_samples = len(rows.labels)
        dense = np.zeros((num_samples, self.schema.num_dense), np.float32)
        for number, name in enumerate(self.schema.dense):
            dense[:, number] = self._number(name, rows.dense[name])
        found: dict[str, npt.NDArray[np.int32]] = {}
        num_rare: dict[str, int] = {}
        for table in self._tables.values():
            vocabulary = self._vocabularies.get(table.name)
            for name in table.columns:
                ids = rows.ids[name].ids
                if vocabulary is not None:
                    ids = vocabulary.rows(ids)
                    num_rare[name] = int((ids == RARE_ROW).sum())
                found[name] = ids
        lengths = [rows.ids[name].lengths for name in self.lists]
        return EncodedRows(
            labels=rows.labels,
            dense=dense,
            ids=np.array([found[name] for name in self.single], np.int32).reshape(-1, num_samples),
            lengths=np.array(lengths, np.int32).reshape(-1, num_samples),
            values=tuple(found[name] for name in self.lists),
            num_rare=num_rare,
        )

    def save(self, folder: Path) -> None:
        """Write encoder.json beside the vocabularies of a folder."""
        figures = {name: asdict(of) for name, of in self._figures.items()}
        fields = {"version": 1, "schema": self.schema.to_json(), "figures": figures}
        write_json(folder / FILE_NAME, fields)

    @classmethod
    def load(cls, folder: Path) -> ColumnEncoder:
        """Read the encoder of a folder.

        Raises:
            DataError: the folder has none, or it is damaged.
        """
        path = folder / FILE_NAME
        form = read_form(read_json_object(path, noun="encoder"), _Form, name=str(path))
        names = [name for name, of in form.schema.tables().items() if of.ids == "vocabulary"]
        vocabularies = {
            name: Vocabulary(vocabulary_path(folder, number)) for number, name in enumerate(names)
        }
        return cls(form.schema, form.figures, vocabularies)

    def _rows(self, table: TableOptions) -> int:
        if table.name in self._vocabularies:
            return self._vocabularies[table.name].num_embeddings
        assert table.rows is not None, "checked by Schema"
        return table.rows

    def _number(self, name: str, numbers: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
        if name in self._figures:
            figures = self._figures[name]
            numbers = (numbers - figures.mean) / (figures.deviation or 1.0)
        return np.nan_to_num(numbers, nan=0.0)


def vocabulary_path(folder: Path, number: int) -> Path:
    """Return the file of the encoder's vocabulary with this number."""
    return folder / f"vocabulary-{number:05}.npy"


def encoder_digest(folder: Path) -> str:
    """Return a digest of an encoder's files, by which a model recognizes its encoder."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
