"""The report compares the orders of a rank's tables by the means of their rounds."""

from benchmarks import table_order
from benchmarks.table_order import DRAWN, MODEL


def test_means_of_rounds_are_compared_in_each_task():
    times_ms = {
        (0, DRAWN): {0: (4.0, 6.0), 1: (5.0, 5.0)},  # rounds of each draw: means do not differ
        (0, MODEL): {0: (4.0, 4.0), 1: (4.0, 4.0)},
        (1, DRAWN): {0: (8.0, 8.0), 1: (12.0, 12.0)},
        (1, MODEL): {0: (9.0, 9.0), 1: (9.0, 9.0)},
    }
    rows = [
        {"number": number, "order": order, "draw": draw}
        | {"fwd_compute": ms, "bwd_compute": 3 * ms}
        for (number, order), by_draw in times_ms.items()
        for draw, rounds in by_draw.items()
        for ms in rounds
    ]
    lines = table_order.report(rows, None).splitlines()[2:]
    names = ["fwd compute", "bwd compute", "computation"]
    assert [line.split("|")[1].strip() for line in lines] == names
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[1].startswith("0.850 [")
        assert cells[2:] == ["0.800", "14.1%", "0.0%"]
