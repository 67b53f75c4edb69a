"""Comparisons of runs that rounds measured, and of runs under different prices."""

import dataclasses

from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.runs.comparison import summarize
from dlrm_sharded.runs.comparison_text import comparison_markdown, short_table
from dlrm_sharded.runs.rounds import rounds_file
from tests.unit.runs.test_comparison import cells, ran
from tests.unit.runs.test_ranking import ROUND


def test_predictions_by_other_prices_are_left_out():
    """They would differ by the prices, and not by the sharders."""
    figures = {"embedding_cost_ms": 10.0, "predicted_ms": 12.0, "gap": 0.1}
    digests = ("aa", "aa"), ("aa", "bb")
    same, other = (
        summarize([ran(seed=i, **figures, prices_digest=digest) for i, digest in enumerate(pair)])
        for pair in digests
    )
    assert "gap, %" in cells(same)[0]
    assert "prediction, %" in cells(same, table=1)[0]
    assert "gap, %" not in cells(other)[0]
    assert "prediction, %" not in cells(other, table=1)[0]
    assert "prices: not the same in all" in comparison_markdown(other)
    assert "prices:" not in comparison_markdown(same)


def test_rounds_rank_the_runs_that_share_a_setting(tmp_path):
    runs = []
    for sharder, speed in (("dim", 1.0), ("size", 1.2)):
        for batch in ("64", "128"):
            run = ran(sharder, setting=(("batch_size", batch),), sweep=f"{tmp_path}/{batch}")
            runs.append(run)
            run.folder.mkdir(parents=True)
            write_json(run.folder / "plan.json", {"shards": [sharder]})
            for number in range(8):
                figure = 1000 * speed * (1 + 0.01 * (number % 3))
                fields = {**dataclasses.asdict(ROUND), "round": number, "samples_per_s": figure}
                rounds_file(run.folder).append(fields)
    comparison = summarize(runs)
    lines = short_table(comparison).splitlines()[-4:]
    assert lines[0] == "batch_size=64: size 1.200 x dim (1.2 to 1.2)"
    assert lines[3] == ("batch_size=128: size is the fastest, with 95 % confidence in each ratio")
    assert "size 1.200 x dim (1.2 to 1.2)" in comparison_markdown(comparison)
    (runs[0].folder / "plan.json").write_text("{")
    assert len(summarize(runs).rankings) == 2
    assert not summarize([ran("dim"), ran("size")]).rankings
