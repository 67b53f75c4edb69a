"""Damage to files, as a disk or a killed process leaves it."""

from pathlib import Path


def cut_off(path: Path) -> None:
    """Leave out the last bytes of a file."""
    path.write_bytes(path.read_bytes()[:-8])


def change_a_byte(path: Path) -> None:
    """Flip a bit near the end of a file."""
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
