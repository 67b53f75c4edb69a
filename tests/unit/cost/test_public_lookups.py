"""The prior of GPUs against published times: those that it was fitted to, and others."""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded.cost.gpu_lookups import (
    FITTED,
    KERNEL_MS,
    LEFT_OUT_ERRORS,
    LOOKUP_ERROR,
    NUM_KERNELS,
)
from dlrm_sharded.hardware.gpus.gpu_specs import gpu_specs
from tests.unit.cost.public_lookups import (
    FITTED_LOOKUPS,
    FITTED_SOURCES,
    H100_HBM2E,
    HELD_OUT,
    PublicLookup,
)

H100_SOURCES = ("recsys-examples", "torchrec 2365")


def mean_error(lookups: list[PublicLookup]) -> float:
    return float(np.mean([abs(lookup.error()) for lookup in lookups]))


def test_no_bandwidth_is_above_the_nominal_one() -> None:
    assert min(FITTED.read_factor, FITTED.write_factor, FITTED.update_factor) >= 1.0


@pytest.mark.parametrize("source", FITTED_SOURCES)
def test_each_source_is_predicted(source: str) -> None:
    """The stated errors are of fits without the source, so they are larger."""
    stated = LEFT_OUT_ERRORS["h100" if source in H100_SOURCES else "v100"]
    lookups = [lookup for lookup in FITTED_LOOKUPS if lookup.source == source]
    assert mean_error(lookups) < stated <= LOOKUP_ERROR


def test_long_bags_were_not_fitted_and_are_predicted() -> None:
    lookups = [lookup for lookup in HELD_OUT if lookup.source == "torchrec 2365, long bags"]
    assert len(lookups) == 7
    assert mean_error(lookups) < 0.1


def test_nothing_is_both_fitted_and_held_out() -> None:
    assert not {lookup.source for lookup in HELD_OUT} & {*FITTED_SOURCES}


def test_each_source_has_its_own_gpu() -> None:
    gpus = {lookup.source: lookup.gpu for lookup in (*FITTED_LOOKUPS, *HELD_OUT)}
    assert gpus["recsys-examples"] is gpu_specs()["h100_sxm"]
    assert gpus["torchrec 2365"] is gpus["torchrec 2365, long bags"] is H100_HBM2E
    assert gpus["ml_perf_model"].key == "v100_sxm"
    assert gpus["torchrec 4757"].memory_gb_per_s == pytest.approx(2525 / 0.647, rel=1e-3)


def test_the_series_by_width_has_the_shapes_of_its_script() -> None:
    """262,144 bags of one feature are handed to 4 tables."""
    widths = [lookup for lookup in FITTED_LOOKUPS if lookup.source == "torchrec 2365"]
    for lookup in widths:
        assert lookup.num_tables * lookup.bags == 262_144
        assert lookup.ids / lookup.bags == pytest.approx(9.5, abs=0.01)
        assert lookup.unique_ids == pytest.approx(99_800, rel=1e-3)


def test_a_kernels_time_has_no_launch_and_no_sort() -> None:
    kernel = next(lookup for lookup in FITTED_LOOKUPS if lookup.is_backward and lookup.is_kernel)
    whole = dataclasses.replace(kernel, is_kernel=False)
    work_on_ids = whole.predicted_ms() - kernel.predicted_ms() - NUM_KERNELS[1] * KERNEL_MS
    ids = kernel.num_tables * kernel.ids
    cycles = FITTED.backward_id_cycles + 3 * 4.0
    assert work_on_ids == pytest.approx(ids * cycles / kernel.gpu.multiprocessor_ghz / 1e6)


def test_rows_in_fp16_are_predicted_faster() -> None:
    half = next(lookup for lookup in HELD_OUT if lookup.is_half)
    assert half.predicted_ms() < dataclasses.replace(half, is_half=False).predicted_ms()
