"""Reads the fingerprint, probes the speed, and compares both with the packaged artefacts."""

from __future__ import annotations

from dlrm_sharded.cost.learned import shipped_cost_model
from dlrm_sharded.hardware.artifact import ARTIFACT_SUFFIX, SHIPPED
from dlrm_sharded.hardware.compare import compare
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.detect import local_hardware
from dlrm_sharded.hardware.hardware import Hardware
from first_hour.fit import artefact_meta
from studies.study import StudyRun


def run(study: StudyRun) -> None:
    device = study.device(or_cpu=True)
    hardware = local_hardware(device)
    study.record("lines", list(hardware.lines()))
    matches = {}
    for path in sorted(SHIPPED.glob(f"*{ARTIFACT_SUFFIX}")):
        match = compare(hardware, Hardware.from_meta(artefact_meta(path)))
        matches[path.stem] = {"is_same": match.is_same, "reasons": list(match.reasons)}
    study.record("packaged", matches)
    standing = shipped_cost_model(RunContext(device.type, hardware)).standing
    assert standing is not None
    study.record("prices", standing.text)
    study.show(name=hardware.name, prices=standing.short_text)
