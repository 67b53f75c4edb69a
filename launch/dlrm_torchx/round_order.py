"""The order of a sweep in rounds, which its driver writes and its ranks read, without torch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from dlrm_sharded.files.json_files import read_json_object, replace_file, write_json
from dlrm_sharded.runs.rounds import read_rounds, rounds_to_repeat
from dlrm_torchx.mailbox import ORDER, JobMailbox

PROGRESS = "progress"
"""File in the mailbox with a line about the round under way, for the driver."""


@dataclass(frozen=True, slots=True)
class RoundsOrder:
    """Says what the ranks have to do.

    Args:
        mailboxes: folders of the runs' mailboxes.
        folders: folders of the runs.
        num_rounds: number of rounds after all runs are trained.
        timeout_s: time that a rank waits for the others.
    """

    mailboxes: tuple[str, ...]
    folders: tuple[str, ...]
    num_rounds: int
    timeout_s: float

    def write(self, folder: Path) -> None:
        write_json(folder / ORDER, {key: getattr(self, key) for key in self.__slots__})

    @classmethod
    def read(cls, folder: Path) -> RoundsOrder:
        return cls(**read_json_object(folder / ORDER, noun="order of rounds"))

    def unmeasured(self, number: int, *, attempt: int = 0) -> list[tuple[int, int]]:
        """Return place and number of each run that still has to be measured in a round.

        Each round has a new random order.

        Args:
            attempt: 1 for the repetition of the round.
        """
        boxes = [JobMailbox(Path(folder)) for folder in self.mailboxes]
        trained = [i for i, box in enumerate(boxes) if box.has_return()]
        drawn = random.Random(f"0 {number} {attempt}").sample(trained, len(trained))

        def is_unmeasured(run: int) -> bool:
            found = read_rounds(Path(self.folders[run])).get(number)
            if attempt:  # a repetition has all runs of the round
                return found is not None and found.attempt < attempt
            return found is None

        return [(place, run) for place, run in enumerate(drawn) if is_unmeasured(run)]

    def begin(self, folder: Path, number: int, *, attempt: int) -> list[tuple[int, int]]:
        """Return what is `unmeasured` in a round; if anything is, tell the driver in a file."""
        left = self.unmeasured(number, attempt=attempt)
        runs = [read_rounds(Path(folder)) for folder in self.folders]
        taken_s = sum(run[n].seconds for run in runs for n in run if n < number)
        text = f"round {number + 1} of {self.num_rounds}"
        if attempt:
            text += " is measured again, because other work disturbed it"
        elif number:
            text += f", about {taken_s / number * (self.num_rounds - number):,.0f} s left"
        if left:
            replace_file(folder / PROGRESS, text.encode())
        return left

    def to_repeat(self) -> list[int]:
        """Return the rounds so far that were disturbed and have to be measured again."""
        return rounds_to_repeat([read_rounds(Path(folder)) for folder in self.folders])

    def num_unmeasured(self) -> int:
        """Return the number of measurements that are left."""
        return sum(len(self.unmeasured(number)) for number in range(self.num_rounds))
