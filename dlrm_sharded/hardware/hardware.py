"""Hardware: a name for people, a fingerprint and a probe for comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.hardware.fingerprint import Fingerprint
from dlrm_sharded.hardware.probe import Probe


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine or GPU that a rank computes on.

    Args:
        name: name from `provenance.device_name`; machines of one name may differ.
        fingerprint, probe: None if an older file does not have them.
    """

    name: str
    fingerprint: Fingerprint | None = None
    probe: Probe | None = None

    def to_meta(self) -> dict[str, Any]:
        """Return the entries for the header of an artifact."""
        return {
            "hardware": self.name,
            "fingerprint": None if self.fingerprint is None else self.fingerprint.to_json(),
            "probe": None if self.probe is None else self.probe.to_json(),
        }

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any], *, name: str = "the hardware") -> Hardware:
        """Read the entries of `to_meta` from a header, which may lack the last two.

        Args:
            name: what has the entries, for messages.

        Raises:
            DataError: an entry is damaged.
        """
        fields = {**meta, "name": meta.get("hardware")}
        return read_form(fields, cls, name=name, may_have_others=True)
