"""The command `dlrm-calibrate` with small plans, each of which counts as a second."""

from dlrm_sharded.calibration.plan_limits import PlanSizes
from dlrm_sharded.commands import calibrate
from tests.first_runs import count_measurements

if __name__ == "__main__":
    calibrate.MODULE = "tests.distributed.small_calibration"
    calibrate.CALIBRATION = PlanSizes({"cpu": 0.01}, {"cpu": 2000}, memory_share=0.01)
    count_measurements()
    calibrate.main()
