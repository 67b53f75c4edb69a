"""The order of a sweep in rounds, which its driver writes and its ranks read; it loads no torch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dlrm_sharded.files.json_files import read_json_object, write_json
from dlrm_sharded.runs.rounds import read_rounds
from dlrm_torchx.mailbox import JobMailbox

ATTEMPT = "rounds"
"""What the mailboxes of the runs know all starts of these processes by."""

ORDER = "rounds.json"


@dataclass(frozen=True, slots=True)
class RoundsOrder:
    """What the processes are to do.

    Args:
        mailboxes: folders of the runs' mailboxes.
        folders: folders of the runs.
        num_rounds: number of rounds after all runs are trained.
        seed: of the order of each round.
        timeout_s: time that a rank waits for the others.
    """

    mailboxes: tuple[str, ...]
    folders: tuple[str, ...]
    num_rounds: int
    seed: int
    timeout_s: float

    def write(self, folder: Path) -> None:
        write_json(folder / ORDER, {key: getattr(self, key) for key in self.__slots__})

    @classmethod
    def read(cls, folder: Path) -> RoundsOrder:
        return cls(**read_json_object(folder / ORDER, noun="order of rounds"))

    def unmeasured(self) -> Iterator[tuple[int, int, int]]:
        """Yield round, place and number of each run that is trained and was not measured there."""
        trained = [i for i, box in enumerate(self.mailboxes) if mailbox_of(box).has_return()]
        for number in range(self.num_rounds):
            drawn = random.Random(f"{self.seed} {number}").sample(trained, len(trained))
            for place, run in enumerate(drawn):
                if number not in read_rounds(Path(self.folders[run])):
                    yield number, place, run


def mailbox_of(folder: str) -> JobMailbox:
    """Return the mailbox of a run in a folder."""
    return JobMailbox(Path(folder), ATTEMPT)
