"""Traces which CUDA-only code tests run: `pytest -p tests.cuda_trace --cuda-ran FILE TESTS`.

FILE gets one line for each piece that ran, in the words of `cuda_only.Piece`. A piece is an
expression of a line as often as a statement, so instructions are traced and not lines.
"""

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from tests.cuda_only import Piece, all_pieces

ROOT = Path(__file__).resolve().parents[1]


class Tracer:
    """Notes which pieces run, in the thread that starts it and in those that begin later."""

    def __init__(self, root: Path, pieces: Sequence[Piece]) -> None:
        self.ran: set[Piece] = set()
        self._by_path: dict[str, list[Piece]] = {}
        for piece in pieces:
            self._by_path.setdefault(str(root / piece.path), []).append(piece)
        self._by_code: dict[CodeType, dict[int, list[Piece]]] = {}

    def start(self) -> None:
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def stop(self) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._by_path or not self._pieces_of(frame.f_code):
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            self.ran.update(self._pieces_of(frame.f_code).get(frame.f_lasti, ()))
        return self._step

    def _pieces_of(self, code: CodeType) -> dict[int, list[Piece]]:
        """Return the pieces of each instruction that belongs to one, by its offset."""
        if code not in self._by_code:
            found: dict[int, list[Piece]] = {}
            for number, (line, end_line, column, end_column) in enumerate(code.co_positions()):
                if None in (line, end_line, column, end_column):
                    continue
                for piece in self._by_path[code.co_filename]:
                    first, last = piece.place[:2], piece.place[2:]
                    if first <= (line, column) and (end_line, end_column) <= last:
                        found.setdefault(2 * number, []).append(piece)
            self._by_code[code] = found
        return self._by_code[code]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cuda-ran", type=Path, required=True, help="file of the pieces that ran")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Plugin(config.getoption("--cuda-ran")))


class _Plugin:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._tracer = Tracer(ROOT, all_pieces(ROOT))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Any:
        self._tracer.start()
        try:
            return (yield)
        finally:
            self._tracer.stop()

    def pytest_sessionfinish(self) -> None:
        self._path.write_text("".join(f"{piece}\n" for piece in sorted(self._tracer.ran)))
