"""TorchRec's planner in a time box: its proposals, and the estimates of its sharding options."""

from __future__ import annotations

from typing import Any

from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import (
    DynamicProgrammingProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.types import Proposer, ShardingOption

from dlrm_sharded.files.errors import InfeasibleTaskError
from dlrm_sharded.sharders.time_box import TimeBox

OPTIONS_PER_LOOK = 256
"""Number of sharding options that are estimated between two looks at the clock."""


class TimedSearch:
    """One search of the planner in its time box.

    TorchRec's own limit does not include the estimates, which take a minute for 2,000 tables.
    """

    def __init__(self, box: TimeBox) -> None:
        self.box = box
        self.num_proposals = 0
        self.was_cut = False

    def proposers(self, *, dynamic_programming: bool = False) -> list[Proposer]:
        """Return the proposers that TorchRec's planner has by default, in the box.

        Args:
            dynamic_programming: whether to add the proposer that minimizes the sum of all tables'
                costs for many limits on their memory.
        """
        proposers: list[Proposer] = [
            GridSearchProposer(),
            GreedyProposer(),
            GreedyProposer(use_depth=False),
            UniformProposer(),
        ]
        if dynamic_programming:
            proposers.append(DynamicProgrammingProposer())
        return [TimedProposer(proposer, self) for proposer in proposers]


class TimedProposer(Proposer):
    """Makes the proposals of another proposer until the time is over; the first one always."""

    def __init__(self, proposer: Proposer, search: TimedSearch) -> None:
        self._proposer = proposer
        self._search = search

    def load(self, *arguments: Any, **options: Any) -> None:
        self._proposer.load(*arguments, **options)

    def feedback(self, *arguments: Any, **options: Any) -> None:
        self._proposer.feedback(*arguments, **options)

    def propose(self) -> list[ShardingOption] | None:
        search = self._search
        proposal: list[ShardingOption] | None = self._proposer.propose()
        if proposal and search.num_proposals and search.box.is_over:
            search.was_cut = True
            return None
        if proposal:
            search.num_proposals += 1
            search.box.report(f"TorchRec's planner made {search.num_proposals:,} proposals")
        return proposal


class TimedEnumerator(EmbeddingEnumerator):
    """Estimates the sharding options in small groups, and stops when the time is over."""

    def __init__(self, search: TimedSearch, **options: Any) -> None:
        super().__init__(**options)
        self._search = search

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        box, num_estimated = self._search.box, 0
        for first in range(0, len(sharding_options), OPTIONS_PER_LOOK):
            options = sharding_options[first : first + OPTIONS_PER_LOOK]
            if box.is_over:
                raise InfeasibleTaskError(
                    f"TorchRec's planner has no plan yet after sharder.timeout_s = "
                    f"{box.limit_s:g} s, in which it estimated {num_estimated:,} of "
                    f"{len(sharding_options):,} ways to place shards; raise sharder.timeout_s, or "
                    "use sharder=search"
                )
            super().populate_estimates(options)
            num_estimated = first + len(options)
            box.report(
                f"TorchRec's planner estimated {num_estimated:,} of {len(sharding_options):,} "
                "ways to place shards"
            )
