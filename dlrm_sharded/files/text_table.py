"""Tables of figures, in Markdown or as aligned text for terminals; quantities and ranges."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Number

UNKNOWN = "-"
"""Text of a cell whose value is None."""


@dataclass(frozen=True, slots=True)
class Column:
    """The format of a column.

    Args:
        spec: format of its numbers, such as ",.2f"; texts are not formatted.
        align: alignment in a terminal: "<" for left, ">" for right.
    """

    title: str
    spec: str = ""
    align: str = "<"

    def cell(self, value: object) -> str:
        """Return one value as a single line of text."""
        if value is None:
            return UNKNOWN
        text = format(value, self.spec) if isinstance(value, Number) else str(value)
        return " ".join(text.split())


@dataclass(frozen=True, slots=True)
class TextTable:
    """Rows of values, and the format of each column.

    Args:
        columns: columns in order; a bare title stands for a column without a format.
        rows: rows with a value for each column.
    """

    columns: Sequence[Column | str]
    rows: Sequence[Sequence[object]]

    def markdown(self) -> str:
        """Return a Markdown table, with special characters in cells escaped."""
        head, *body = [f"| {' | '.join(map(escaped, cells))} |" for cells in self._cells()]
        return "\n".join([head, f"|{'---|' * len(self.columns)}", *body])

    def text(self) -> str:
        """Return lines for a terminal, in columns two spaces apart."""
        lines = self._cells()
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        aligns = [column.align for column in self._columns()]
        return "\n".join(
            "  ".join(
                f"{cell:{align}{width}}"
                for cell, align, width in zip(cells, aligns, widths, strict=True)
            ).rstrip()
            for cells in lines
        )

    def _columns(self) -> list[Column]:
        return [Column(one) if isinstance(one, str) else one for one in self.columns]

    def _cells(self) -> list[list[str]]:
        columns = self._columns()
        body = [
            [column.cell(value) for column, value in zip(columns, row, strict=True)]
            for row in self.rows
        ]
        return [[column.title for column in columns], *body]


def quantity(number: int, noun: str) -> str:
    """Write a number with its noun, such as 1 job or 2,000 jobs."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def span(values: Iterable[float], spec: str = "") -> str:
    """Write the least and the largest value, or one of them if they look the same."""
    found = sorted(values)
    return " to ".join(dict.fromkeys(format(value, spec) for value in (found[0], found[-1])))


def listed(lines: Iterable[str]) -> str:
    """Return a Markdown list."""
    return "\n".join(f"- {escaped(line)}" for line in lines)


def escaped(text: str) -> str:
    """Return text with Markdown's special characters escaped."""
    text = re.sub(r"([\\|`*]|\](?=[(\[:])|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", text)
    return text.replace("&", "&amp;").replace("<", "&lt;")
