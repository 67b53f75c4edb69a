"""A table has the same figures in a terminal and in Markdown."""

import math

from dlrm_sharded.files.text_table import Column, TextTable

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
