"""Measured and predicted cost of splitting a table: the sum of its pieces over the whole table.

Each piece is looked up with the same other tables, whose own time is subtracted.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Iterator, Sequence

import numpy as np
from tqdm import tqdm

from benchmarks.compared import Row, add_row_arguments, interval_text, markdown, rows_of
from benchmarks.shard_bench import (
    add_round_arguments,
    compute_ms,
    interleaved,
    open_bench,
    random_ids,
)
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.calibration.rank_bench import RankBench
from dlrm_sharded.cost.features import workload_of_plan
from dlrm_sharded.cost.learned import LearnedCostModel, learned_cost_model
from dlrm_sharded.datasets.presets import dlrm_datasets_pool, draw_tables
from dlrm_sharded.datasets.task_sets import MEASURED_BATCH_SIZE
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.detect import local_hardware
from dlrm_sharded.plans.layouts import row_blocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology

DIMS = (16, 32, 48, 64, 96, 128)
ROWS = (10_000, 3_000_000)
IDS = (2.0, 40.0)
MOST_TABLE_BYTES, MOST_OTHER_BYTES = GIB, GIB // 2
NUM_OTHERS, IDS_OF_OTHERS = 6, 10.0
WHOLE, AGAIN, OTHERS = "whole", "whole again", "others"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tables", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    add_round_arguments(parser, rounds=5, item="piece")
    add_row_arguments(parser, row="table", report="table")


def run(options: argparse.Namespace) -> None:
    report(rows_of(options, _rows(options)))


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    table_bytes = MOST_TABLE_BYTES + MOST_OTHER_BYTES
    with open_bench(options.iterations, table_bytes=table_bytes) as (bench, device):
        model = learned_cost_model(RunContext(device=device.type, hardware=local_hardware(device)))
        for number in tqdm(range(options.tables), unit="table"):
            rng = np.random.default_rng([options.seed, number])
            yield _measured(bench, model, random_table(rng), rng, rounds=options.rounds)


def random_table(rng: np.random.Generator) -> Table:
    """Draw a table whose rows and ids per sample are uniform on a log scale."""
    dim = int(rng.choice(DIMS))
    num_rows = round(ROWS[0] * (ROWS[1] / ROWS[0]) ** rng.random())
    ids = IDS[0] * (IDS[1] / IDS[0]) ** rng.random()
    return Table("table", min(num_rows, MOST_TABLE_BYTES // (4 * dim)), dim, float(ids))


def other_tables() -> tuple[Table, ...]:
    """Return the other tables on the rank, which are the same for all pieces."""
    drawn = draw_tables(dlrm_datasets_pool(), num_tables=NUM_OTHERS, dims=DIMS, seed=0)
    factor = IDS_OF_OTHERS / sum(table.pooling_factor for table in drawn)
    most = MOST_OTHER_BYTES // NUM_OTHERS
    return tuple(
        dataclasses.replace(
            table,
            num_embeddings=min(table.num_embeddings, most // (4 * table.embedding_dim)),
            pooling_factor=factor * table.pooling_factor,
        )
        for table in drawn
    )


def splits(table: Table) -> dict[str, list[tuple[Shard, int]]]:
    """Return ways to split a table: for each, its different pieces and the number of each."""
    whole = Shard.whole(table, rank=0)
    dim, quarter = table.embedding_dim, table.embedding_dim // 4
    smaller = max(COLUMN_MULTIPLE, dim // 5 // COLUMN_MULTIPLE * COLUMN_MULTIPLE)

    def cols(start: int, stop: int) -> Shard:
        return dataclasses.replace(whole, cols=(start, stop))

    ways = {
        "columns, uneven halves": [(cols(0, smaller), 1), (cols(smaller, dim), 1)],
        "columns, quarters": [(cols(0, quarter), 4)],
    }
    for blocks in (2, 4, 8):
        first = row_blocks(table.num_embeddings, blocks)[0]
        ways[f"rows, {blocks} blocks"] = [(dataclasses.replace(whole, rows=first), blocks)]
    return ways


def _measured(
    bench: RankBench,
    model: LearnedCostModel,
    table: Table,
    rng: np.random.Generator,
    *,
    rounds: int,
) -> Row:
    """Return measured and predicted times of the pieces with the other tables."""
    others = other_tables()
    task = with_profiles(ShardingTask((table, *others), Topology(1, 2 * GIB), MEASURED_BATCH_SIZE))
    ids = random_ids(task, rng)
    background = [Shard.whole(other, rank=0) for other in others]
    whole = Shard.whole(table, rank=0)
    groups = {OTHERS: background}
    groups |= {name: [*background, whole] for name in (WHOLE, AGAIN)}
    for way, parts in splits(table).items():
        groups |= {_name(way, i): [*background, piece] for i, (piece, _) in enumerate(parts)}
    measured = {
        name: [compute_ms(cost) for cost in costs]
        for name, costs in interleaved(bench, groups, ids, rounds=rounds, rng=rng).items()
    }
    predicted, priced = {}, model.price(task)
    for name, shards in groups.items():
        workload = workload_of_plan(ShardingPlan(1, tuple(shards)), task)
        cost = priced.predict_workload(workload).per_rank[0]
        predicted[name] = compute_ms(cost)
    return {"table": table.to_json(), "measured_ms": measured, "predicted_ms": predicted}


def _name(way: str, piece: int) -> str:
    return f"{way}, {piece}"


def prices(row: Row) -> dict[str, tuple[float, float]]:
    """Return measured and predicted costs of each split, over the whole table, without the others.

    `WHOLE` has the times of the whole table in ms, `AGAIN` its second measurement over the first.
    """
    # Times are subtracted round by round because the machine drifts.
    measured_ms = {
        name: statistics.median(
            time - other for time, other in zip(times, row["measured_ms"][OTHERS], strict=True)
        )
        for name, times in row["measured_ms"].items()
    }
    predicted_ms = {
        name: time - row["predicted_ms"][OTHERS] for name, time in row["predicted_ms"].items()
    }
    table = Table.from_json(row["table"])
    ratios = {
        WHOLE: (measured_ms[WHOLE], predicted_ms[WHOLE]),
        AGAIN: (measured_ms[AGAIN] / measured_ms[WHOLE], 1.0),
    }
    for way, parts in splits(table).items():
        sums = [
            sum(count * times[_name(way, i)] for i, (_, count) in enumerate(parts)) / times[WHOLE]
            for times in (measured_ms, predicted_ms)
        ]
        ratios[way] = (sums[0], sums[1])
    return ratios


def report(rows: Sequence[Row]) -> None:
    """Print the bias and the spread of the predicted costs."""
    by_name: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, pair in prices(row).items():
            by_name.setdefault(name, []).append(pair)
    lines = []
    for name, pairs in by_name.items():
        measured, predicted = np.array(pairs).T
        ratios = measured / predicted
        lines.append(
            [
                f"{name}, ms" if name == WHOLE else f"{name}, over whole",
                len(pairs),
                f"{measured.mean():.3f}",
                f"{predicted.mean():.3f}",
                interval_text(ratios, ".3f"),
                f"{np.std(ratios, ddof=1) if len(ratios) > 1 else 0:.3f}",
                ", ".join(f"{q:.3f}" for q in np.percentile(ratios, [10, 50, 90])),
            ]
        )
    header = ["price", "tables", "measured, mean", "predicted, mean"]
    header += ["measured / predicted, mean [95 %]", "spread", "10, 50, 90 %"]
    print(f"\n{markdown(header, lines)}")
