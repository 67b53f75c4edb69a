"""Counter-based random numbers: each is a pure function of a stream's key and a counter.

A stateful generator must draw all earlier numbers first. Here a number is a hash of key and
counter, so that every rank can generate its share of any batch directly.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint64]
Floats = NDArray[np.float64]

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def stream_key(*parts: int | str) -> int:
    """Return the 64-bit key of the stream with this name; every name gives another stream."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def counters(start: int, count: int) -> Bits:
    """Return [count], the counters start, start + 1, ..."""
    return np.arange(start, start + count, dtype=np.uint64)


def random_bits(key: int, counter: Bits) -> Bits:
    """Return [N], 64 random bits for each counter.

    They are element number `counter` of the splitmix64 generator that starts at `key` (Steele, Lea,
    Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
    """
    bits = counter * _GOLDEN
    bits += np.uint64(key)
    bits ^= bits >> 30
    bits *= _MIX_1
    bits ^= bits >> 27
    bits *= _MIX_2
    bits ^= bits >> 31
    return bits


def uniforms(key: int, counter: Bits) -> Floats:
    """Return [N], uniform in [0, 1)."""
    return (random_bits(key, counter) >> 11).astype(np.float64) * 2.0**-53


def uniform_pairs(key: int, counter: Bits) -> tuple[Floats, Floats]:
    """Return two independent [N], uniform in (0, 1), with 32 random bits each."""
    bits = random_bits(key, counter)
    high, low = bits >> 32, bits.astype(np.uint32)
    return (high.astype(np.float64) + 0.5) * 2.0**-32, (low.astype(np.float64) + 0.5) * 2.0**-32


def normals(key: int, counter: Bits) -> Floats:
    """Return [N], standard normal (Box and Muller, 1958)."""
    radius, angle = uniform_pairs(key, counter)
    return np.sqrt(-2.0 * np.log(radius)) * np.cos(2.0 * np.pi * angle)
