"""A table has the same figures in a terminal and in Markdown."""

import math

from dlrm_sharded.files.text_table import Column, TextTable, quantity, span

TABLE = TextTable(
    ["sharder", Column("cost, ms", ",.2f", align=">"), Column("ranks", align=">")],
    [("random", 1234.5678, 8), ("dim", None, 16), ("a|b\nc", math.nan, "unknown")],
)


def test_markdown_has_one_line_for_each_row() -> None:
    assert TABLE.markdown().splitlines() == [
        "| sharder | cost, ms | ranks |",
        "|---|---|---|",
        "| random | 1,234.57 | 8 |",
        "| dim | - | 16 |",
        r"| a\|b c | nan | unknown |",
    ]


def test_a_terminal_has_aligned_columns() -> None:
    assert TABLE.text().splitlines() == [
        "sharder  cost, ms    ranks",
        "random   1,234.57        8",
        "dim             -       16",
        "a|b c         nan  unknown",
    ]


def test_quantities_are_singular_or_plural_and_ranges_have_two_ends() -> None:
    assert [quantity(n, "job") for n in (0, 1, 2000)] == ["0 jobs", "1 job", "2,000 jobs"]
    assert [span([4, 2, 4]), span([4, 4]), span([0.121, 0.124], ".2f")] == ["2 to 4", "4", "0.12"]
