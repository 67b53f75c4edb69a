"""Defines a study of the benchmark: items that can be run one by one, and the rows they give.

Glossary:
    study   a question, and the items whose rows answer it
    item    a piece of work that is done whole or not at all, such as one plan of one task
    basis   what the figures of a study are: measured, predicted or simulated
    row     figures of an item by name; it names the study, the item and the basis
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Row = dict[str, Any]
Basis = Literal["measured", "predicted", "simulated"]


@dataclass(frozen=True, slots=True)
class Item:
    """A piece of work.

    Args:
        key: unique in its study; it says what the work depends on.
        seconds: expected time, from which the remaining time of the benchmark is estimated.
        run: does the work and returns its rows.
    """

    key: str
    seconds: float
    run: Callable[[], list[Row]]


@dataclass(frozen=True, slots=True)
class Study:
    """A question that the benchmark answers.

    Args:
        name: short name, by which the command line chooses studies.
    """

    name: str
    basis: Basis
    items: Sequence[Item]
