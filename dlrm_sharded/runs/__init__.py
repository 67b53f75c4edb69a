"""Writes, reads and compares the folders of runs.

What a run does is decided in `job`.

result.py               result.json: one schema for writing and reading it
owner.py                the one job that may write to a run's folder
remote_copy.py          the copy of a run's folder in an object store
terminal.py             texts that a run prints in the terminal
run_events.py           the event file of a run, for TensorBoard
run_folder.py           finding and reading the runs in folders
rounds.py               measurements of a run in the rounds of a sweep
ranking.py              ratios from pairs, and which sharder is the fastest
comparison*.py          runs grouped and averaged; as text, figures, and in TensorBoard
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import replace_file


def compare(folders: Sequence[Path], out: Path) -> str:
    """Compare all runs in folders, which are runs, sweeps, or trees of them.

    Args:
        out: folder for summary.md, summary.csv, runs.csv, and comparison/ for TensorBoard.

    Returns:
        The table for the terminal.

    Raises:
        DataError: a folder does not exist, or none holds a run.
        ConfigError: `out` cannot be written.
    """
    # These load polars and matplotlib, which neither a rank nor --help needs.
    from dlrm_sharded.runs.comparison import summarize
    from dlrm_sharded.runs.comparison_figures import write_comparison
    from dlrm_sharded.runs.comparison_text import comparison_markdown, short_table
    from dlrm_sharded.runs.run_folder import find_runs

    comparison = summarize(*find_runs(folders))
    try:
        out.mkdir(parents=True, exist_ok=True)
        replace_file(out / "runs.csv", comparison.table.write_csv().encode())
        replace_file(out / "summary.csv", comparison.summary.write_csv().encode())
        text = f"# Comparison of runs\n\n{comparison_markdown(comparison)}"
        replace_file(out / "summary.md", text.encode())
        write_comparison(comparison, out / "comparison")
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or out}: {error.strerror}") from error
    return short_table(comparison)


def compare_sweep(sweep_dir: Path) -> str:
    """Compare the runs of a sweep in its own folder; return the table for the terminal."""
    table = compare([sweep_dir], sweep_dir)
    return f"comparison in {sweep_dir / 'summary.md'}; tensorboard --logdir {sweep_dir}\n{table}"
