import dataclasses
import subprocess
from collections.abc import Callable, Iterator

import pytest
import torch

from dlrm_sharded.calibration.factor_fit import fitted_to
from dlrm_sharded.calibration.observed import observed_times
from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.calibration.samples import Sample
from dlrm_sharded.cost.gpu_prior import gpu_cost_model
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.hardware.artifact import SHIPPED
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.ranks.distributed import Rank, process_group
from tests.unit.cost.hardware import measured_plans

OF_A_CPU = str(SHIPPED / "learned-cpu_amd_epyc.safetensors")
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


@pytest.fixture
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher has started this process."""
    for key in RANK_VARIABLES:
        monkeypatch.delenv(key, raising=False)


@pytest.fixture(scope="module")
def rank() -> Iterator[Rank]:
    """The only rank of a job, which lasts for the tests of a file."""
    with pytest.MonkeyPatch.context() as patch:
        for key in RANK_VARIABLES:
            patch.delenv(key, raising=False)
        with process_group() as me:
            yield me


@pytest.fixture
def tf32() -> Iterator[Callable[..., bool]]:
    """Says whether GPUs may round fp32 products, and sets it; it is as before after the test."""
    products = torch.backends.cuda.matmul
    before = products.allow_tf32

    def allowed(value: bool | None = None) -> bool:
        if value is not None:
            products.allow_tf32 = value
        return products.allow_tf32

    yield allowed
    products.allow_tf32 = before


RunCommand = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Calls the `main` of a command with the words of a command line, in this process."""

    def run(main: Callable[[], object], *words: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr("sys.argv", ["command", *map(str, words)])
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(words, code, printed.out, printed.err)

    return run


@pytest.fixture(scope="session")
def costs() -> tuple[Sample, ...]:
    """Random plans with their times on the synthetic hardware."""
    return measured_plans(200, 80, seed=0)


@pytest.fixture(scope="session")
def model(costs: tuple[Sample, ...]) -> LearnedCostModel:
    """The packaged model of a CPU, fitted to plans on the synthetic hardware."""
    prior = learned_cost_model(RunContext("cpu"), OF_A_CPU)
    fitted = fitted_to([observed_times(prior, each) for each in costs]).applied(prior)
    return dataclasses.replace(fitted, name="synthetic", provenance=None, correction=None)


@pytest.fixture(scope="session")
def unseen() -> tuple[Sample, ...]:
    """Other plans on the same hardware."""
    return measured_plans(150, 60, seed=1)


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def of_device(request: pytest.FixtureRequest) -> LearnedCostModel:
    """The packaged model of a CPU, and the prior of a GPU with stated figures."""
    if request.param == "cuda":
        return gpu_cost_model(RunContext("cuda"), {"memory_gb_per_s": 2000, "link_gb_per_s": 300})
    return learned_cost_model(RunContext("cpu"), OF_A_CPU)
