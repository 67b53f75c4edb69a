"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table; cells must not have a bare `|` in them."""
    head, *body = [f"| {' | '.join(map(str, cells))} |" for cells in (titles, *rows)]
    return [head, f"|{'---|' * len(titles)}", *body]
