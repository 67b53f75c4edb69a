"""Random numbers that are a pure function of their place in a stream.

A generator with a state must draw everything before a value to reach it. Here the value is a hash
of (stream, place), so every rank draws its share of a batch alone and any batch can be resumed.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint64]
Floats = NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_11, _SHIFT_27, _SHIFT_30, _SHIFT_31, _SHIFT_32 = (
    np.uint64(shift) for shift in (11, 27, 30, 31, 32)
)


def stream_key(*parts: int | str) -> int:
    """The 64-bit key of the stream that these parts name; every other name is another stream."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def places(start: int, count: int) -> Bits:
    """[count], the places start, start + 1, ... of a stream."""
    return np.arange(start, start + count, dtype=np.uint64)


def random_bits(key: int, place: Bits) -> Bits:
    """[N], 64 random bits at each place of the stream.

    They are element number `place` of the splitmix64 generator that starts at `key` (Steele, Lea,
    Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
    """
    bits = place * _GOLDEN
    bits += np.uint64(key)
    bits ^= bits >> _SHIFT_30
    bits *= _MIX_1
    bits ^= bits >> _SHIFT_27
    bits *= _MIX_2
    bits ^= bits >> _SHIFT_31
    return bits


def uniforms(key: int, place: Bits) -> Floats:
    """[N], uniform in [0, 1)."""
    return (random_bits(key, place) >> _SHIFT_11).astype(np.float64) * 2.0**-53


def uniform_pairs(key: int, place: Bits) -> tuple[Floats, Floats]:
    """Two independent [N], uniform in (0, 1), 32 bits each."""
    bits = random_bits(key, place)
    high, low = bits >> _SHIFT_32, bits.astype(np.uint32)
    return (high.astype(np.float64) + 0.5) * 2.0**-32, (low.astype(np.float64) + 0.5) * 2.0**-32


def normals(key: int, place: Bits) -> Floats:
    """[N], standard normal (Box and Muller, 1958)."""
    radius, angle = uniform_pairs(key, place)
    return np.sqrt(-2.0 * np.log(radius)) * np.cos(2.0 * np.pi * angle)
