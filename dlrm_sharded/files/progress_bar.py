"""Progress bars, which become occasional lines without a terminal."""

from __future__ import annotations

import math
import sys
import threading
from typing import Any

from tqdm import tqdm

LINE_EVERY_S = 30.0
"""Time between two lines in a log; a shorter task has a line only at its end."""


class ProgressBar(tqdm):
    """A tqdm bar on a terminal; elsewhere, a line of text every `LINE_EVERY_S` seconds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not sys.stderr.isatty():
            now_and_then = {"mininterval": LINE_EVERY_S, "miniters": 1, "delay": LINE_EVERY_S}
            kwargs = now_and_then | {"maxinterval": LINE_EVERY_S, "ncols": 100} | kwargs
        super().__init__(*args, **kwargs)

    @staticmethod
    def status_printer(file: Any) -> Any:
        """Return the function that prints a state: in place on a terminal, else on a new line."""
        if sys.stderr.isatty():
            return tqdm.status_printer(file)
        return lambda state: print(state, file=file, flush=True) if state else None

    def close(self) -> None:
        """End the bar; without a terminal, its last line has ended already."""
        if not (self.disable or sys.stderr.isatty()):
            if self.n > self.last_print_n:
                self.display()
            self.delay = math.inf  # keeps tqdm from ending the line again
        super().close()


# Only one process draws a bar. tqdm's default lock is for several processes, and creating one fixes
# how Python starts all other processes of a user (`multiprocessing.set_start_method`).
ProgressBar.set_lock(threading.RLock())
