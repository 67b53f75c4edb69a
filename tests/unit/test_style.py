"""Rules of CONTRIBUTING.md that no linter holds: sizes, and one word for one thing."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("dlrm_sharded", "launch", "scripts")
MODULES = [path for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.py")]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
MAX_FILE_LINES, MAX_FUNCTION_LINES = 350, 60

PRIVATE_WORDS = {
    r"rooms?|floors?": "package, layer, free memory",
    r"price[ds]?|pricing": "cost, costed",
    r"undercut\w*": "cost less than",
    r"first starts?": "first measurement",
    r"standings?": "provenance, place",
    r"odd tasks?|made up": "stress tasks, synthetic",
    r"beside other work": "under load",
    r"mend(s|ed|ing)?": "fix",
    r"outbox|surroundings|stretch(es)?": "staging folder, load, segment",
    r"artefacts?": "artifact",
}
"""Patterns of words that only this project would understand, and what to write."""

BLOCKS = re.compile(r"^```.*?^```$|^    .*?$", re.M | re.S)
NAMES = re.compile(r"`[^`]+`|^ *prices(?:_digest)?:", re.M)
"""Code, whose names are not prose. Some names of files and keys are those of earlier releases."""


def docstrings(path: Path) -> Iterator[str]:
    """Docstrings of a module's public names."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and not str(getattr(node, "name", "")).startswith("_"):
            yield ast.get_docstring(node) or ""


def private_words(text: str) -> list[str]:
    """The private words of a text without its code, with what to write in their place."""
    prose = NAMES.sub("", text)
    return [
        f"{found.group()}: write {better}"
        for pattern, better in PRIVATE_WORDS.items()
        for found in re.finditer(rf"\b(?:{pattern})\b", prose, re.IGNORECASE)
    ]


def test_private_words_are_found() -> None:
    assert private_words("Prices of the first start.") == [
        "Prices: write cost, costed",
        "first start: write first measurement",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_use_words_of_the_field(page: Path) -> None:
    assert private_words(BLOCKS.sub("", page.read_text())) == []


def test_docstrings_use_words_of_the_field() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {word}"
        for path in MODULES
        for text in docstrings(path)
        for word in private_words(text)
    }
    assert found == set()


def test_files_and_functions_are_short() -> None:
    long = []
    for path in MODULES:
        text = path.read_text()
        if len(text.splitlines()) > MAX_FILE_LINES:
            long.append(str(path))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                documented = len((ast.get_docstring(node, clean=False) or "").splitlines())
                num_lines = (node.end_lineno or 0) - node.lineno + 1 - documented
                if num_lines > MAX_FUNCTION_LINES:
                    long.append(f"{path}: {node.name}")
    assert long == []
