"""A dataset with planted work beside a first start."""

from typing import Any

from dlrm_sharded.calibration import start_measurement
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from tests.first_starts import count_measurements


class StartBeside(SyntheticDataset):
    """Lets a first start find this other work beside it, or none, whatever the machine does.

    Its seconds are measurements.
    """

    def __init__(self, *arguments: Any, other_work: str | None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        count_measurements()
        start_measurement.disturbance = lambda *found, **figures: other_work
