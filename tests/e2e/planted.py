"""A dataset that plants load on a first run."""

from typing import Any

from dlrm_sharded.datasets.synthetic import SyntheticDataset
from tests.first_runs import count_measurements


class StartUnderLoad(SyntheticDataset):
    """Lets a first run find this load, or none, whatever the machine does.

    Its seconds are measurements.
    """

    def __init__(self, *arguments: Any, other_work: str | None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        count_measurements(other_work)
