"""Compare runs in tables, and in plots for TensorBoard: the command `dlrm-report`.

    dlrm-report runs/2026-11-20_09-45-08-481104     a sweep
    dlrm-report runs out=comparisons/all            all runs in a folder

It takes runs, sweeps, and folders of them. `out` is the folder to write to: by default the given
folder if there is only one, else comparison/ here. It gets summary.md, summary.csv (a row for each
sharder and setting), runs.csv (a row for each run) and comparison/ (for TensorBoard).
"""

from __future__ import annotations

from pathlib import Path

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.words import read_words
from dlrm_sharded.files.json_files import folder_to_write
from dlrm_sharded.runs import compare


def main() -> None:
    with exit_codes():
        names, keys = read_words(__doc__, ("out",), names="runs, sweeps, or folders of them")
        folders = [Path(name) for name in names]
        out = folders[0] if len(folders) == 1 else Path("comparison")
        if "out" in keys:
            out = folder_to_write("out", keys["out"])
        print(compare(folders, out))
        print(f"comparison in {out / 'summary.md'}; TensorBoard: tensorboard --logdir {out}")


if __name__ == "__main__":
    main()
