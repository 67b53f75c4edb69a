"""Reports on plans by prices of other hardware, measured or made up."""

from benchmarks import elsewhere, made_up


def test_plans_on_made_up_hardware_are_compared_with_what_each_names():
    costs = {"no runs": (4.0, 8.0), "1 good": (2.0, 6.0)}
    rows = [
        {"kind": "x", "number": i, "plans_by": name, "cost_ms": cost_ms, "stated": 0.3}
        | {"predicted_ms": 1.5 * cost_ms, "over": {"no runs": costs["no runs"][i], "true": 2.0}}
        for name, by_task in costs.items()
        for i, cost_ms in enumerate(by_task)
    ]
    line = made_up.report(rows, None).splitlines()[-1]
    *begin, error, stated, over, worst, over_true, worst_true = (
        cell.strip() for cell in line.strip("|").split("|")
    )
    assert [*begin, error, stated] == ["x", "1 good", "1.50", "50.0%", "30%"]
    assert [over.split()[0], worst] == ["0.625", "0.750"]
    assert [over_true.split()[0], worst_true] == ["2.000", "3.000"]


def test_prices_elsewhere_are_compared_with_torchrec_and_the_last_model():
    times_ms = {"0 runs": (4.0, 6.0), "ten": (2.0, 4.0), "torchrec": (8.0, 8.0)}
    rows = [
        {
            "number": i,
            "sharder": name,
            "compute_ms": ms,
            "predicted_compute_ms": 2 * ms,
            "stated": None,
        }
        for name, by_task in times_ms.items()
        for i, ms in enumerate(by_task)
    ]
    lines = [line.strip("| ").split("|") for line in elsewhere.report(rows, None).splitlines()]
    first, _, last = ([cell.strip().split(" ")[0] for cell in line] for line in lines[4:7])
    assert first == ["0", "2.00", "100.0%", "-", "0.625", "0.750", "1.750", "2.000"]
    assert last == ["torchrec", "-", "-", "-", "1.000", "1.000", "3.000", "4.000"]
