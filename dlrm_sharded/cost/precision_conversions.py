"""Times that ranks take to convert the numbers of an exchange to another precision and back.

A rank converts its own vectors before an exchange and those that it received after it. In a
reduction the numbers are also added up in that precision, which gloo does in software for fp16.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConversionTimes:
    """Times of one precision, in ms per MB of the numbers in fp32.

    Args:
        forward_encode, forward_decode: conversion of pooled vectors.
        backward_encode, backward_decode: conversion of gradients, with the scale of those in fp16.
        reduce: additional time of a reduction compared with one of as many bytes in fp32.
    """

    forward_encode: float = 0.0
    forward_decode: float = 0.0
    backward_encode: float = 0.0
    backward_decode: float = 0.0
    reduce: float = 0.0

    def of_columns(self, direction: str) -> float:
        """Return the time to convert the vectors of a rank's columns, of all samples."""
        return self.forward_encode if direction == "forward" else self.backward_decode

    def of_samples(self, direction: str) -> float:
        """Return the time to convert the vectors of a rank's samples, of all columns."""
        return self.forward_decode if direction == "forward" else self.backward_encode


CPU_CONVERSIONS = {
    "fp16": ConversionTimes(0.27, 0.13, 0.32, 0.30, 0.55),
    "bf16": ConversionTimes(0.20, 0.10, 0.20, 0.10, 0.02),
    "int8": ConversionTimes(0.17, 0.12, 0.17, 0.12),
}
"""Times for CPUs that nobody has measured: those of one thread of an AMD EPYC with AVX-512, on 2
ranks that convert 8 MB at once."""

MOVED_BYTES = {
    "fp16": (14.0, 6.0, 22.0, 14.0),
    "bf16": (14.0, 6.0, 14.0, 6.0),
    "int8": (9.25, 5.25, 9.25, 5.25),
    "fp8": (9.25, 5.25, 9.25, 5.25),
}
"""Bytes that FBGEMM's codecs read and write on a GPU for a number, in the order of the first four
fields of `ConversionTimes`. fp16 and bf16 clamp (8 B) and then round (6 B); gradients in fp16 are
scaled before and after (8 B each). Rows of int8 and fp8 are read twice, once for their range."""


def gpu_conversions(memory_gb_per_s: float) -> dict[str, ConversionTimes]:
    """Return the times on a GPU, whose memory bounds them: nothing is reused between kernels."""
    return {
        precision: ConversionTimes(*(num_bytes / 4.0 / memory_gb_per_s for num_bytes in moved))
        for precision, moved in MOVED_BYTES.items()
    }
