"""Runs compared: tables for people and programs, and a run of its own in TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dlrm_sharded.errors import ConfigError
from dlrm_sharded.runs.find import find_runs
from dlrm_sharded.runs.summary import Comparison, summarize
from dlrm_sharded.runs.text import markdown, short_table

__all__ = ["Comparison", "compare", "compare_sweep", "short_table"]


def compare(folders: Sequence[Path], out: Path) -> Comparison:
    """Compare all runs in some folders: runs, sweeps, or trees of them.

    Args:
        out: gets summary.md, summary.csv, runs.csv, and comparison/ for TensorBoard.

    Raises:
        DataError: a folder does not exist, or none holds a run.
        ConfigError: `out` cannot be written.
    """
    from dlrm_sharded.runs.board import write_board  # loads matplotlib

    found = find_runs(folders)
    comparison = summarize(found.runs, found.problems)
    try:
        out.mkdir(parents=True, exist_ok=True)
        comparison.table.write_csv(out / "runs.csv")
        comparison.summary.write_csv(out / "summary.csv")
        (out / "summary.md").write_text(f"# Comparison of runs\n\n{markdown(comparison)}")
        write_board(comparison, out / "comparison")
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or out}: {error.strerror}") from error
    return comparison


def compare_sweep(sweep_dir: Path) -> str:
    """Compare the runs of a sweep in its own folder; the table for the terminal."""
    table = short_table(compare([sweep_dir], sweep_dir))
    return f"comparison in {sweep_dir / 'summary.md'}; tensorboard --logdir {sweep_dir}\n{table}"
