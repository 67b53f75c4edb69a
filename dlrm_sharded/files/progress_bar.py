"""Progress bars, which are lines now and then where no terminal is."""

from __future__ import annotations

import math
import sys
import threading
from typing import Any

from tqdm import tqdm

LINE_EVERY_S = 30.0
"""Time between two lines of a log; a shorter task has a line at its end only."""


class ProgressBar(tqdm):
    """A bar of tqdm on a terminal; elsewhere a line of text every `LINE_EVERY_S` seconds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not sys.stderr.isatty():
            now_and_then = {"mininterval": LINE_EVERY_S, "miniters": 1, "delay": LINE_EVERY_S}
            kwargs = now_and_then | {"maxinterval": LINE_EVERY_S, "ncols": 100} | kwargs
        super().__init__(*args, **kwargs)

    @staticmethod
    def status_printer(file: Any) -> Any:
        """Return what shows a state: over the last one on a terminal, else on a line of its own."""
        if sys.stderr.isatty():
            return tqdm.status_printer(file)
        return lambda state: print(state, file=file, flush=True) if state else None

    def close(self) -> None:
        """End the bar, whose last line is ended already where no terminal is."""
        if not (self.disable or sys.stderr.isatty()):
            if self.n > self.last_print_n:
                self.display()
            self.delay = math.inf  # tqdm ends what it has shown, and has nothing to end
        super().close()


# One process draws a bar. tqdm's own lock would be of several, and the first of these decides how
# Python starts all other processes of a user's (`multiprocessing.set_start_method`).
ProgressBar.set_lock(threading.RLock())
