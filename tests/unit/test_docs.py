"""The documentation is true where `mkdocs build --strict` cannot tell: links, rooms, lengths."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
ROOM = re.compile(r"^\| (\d) \| \*\*(\w+)\*\*(?: \((.*?)\))? \|", re.M)
"""Floor, name, and the modules that are not in a folder of that name."""


def rooms() -> tuple[dict[str, str], dict[str, int]]:
    """The room of each module that the architecture names, and the floor of each room."""
    room_of, floor = {}, {}
    for number, name, modules in ROOM.findall((ROOT / "docs" / "architecture.md").read_text()):
        room_of.update(dict.fromkeys(re.findall(r"`([\w.]+)`", modules), name))
        floor[name] = int(number)
    return room_of, floor


def imported_modules(node: ast.AST) -> Iterator[str]:
    """Modules that code imports when it runs: not those for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        if isinstance(child, ast.ImportFrom) and child.module:
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from imported_modules(child)


def room_of_module(module: str, room_of: dict[str, str]) -> str | None:
    """The room of a module or of a name in it; None for other packages and for the package."""
    package, *parts = module.split(".")
    if package != "dlrm_sharded":
        return room_of.get(package)
    if parts in ([], ["__init__"]):
        return None
    return room_of.get(".".join(parts[:2])) or room_of.get(parts[0]) or parts[0]


def test_rooms_import_rooms_of_lower_floors() -> None:
    room_of, floor = rooms()
    wrong = []
    for folder, above in (("dlrm_sharded", ROOT), ("launch", ROOT / "launch")):
        for path in (ROOT / folder).rglob("*.py"):
            module = ".".join(path.relative_to(above).with_suffix("").parts)
            room = room_of_module(module, room_of)
            if room is None:
                continue
            for imported in imported_modules(ast.parse(path.read_text())):
                other = room_of_module(imported, room_of)
                if other not in (None, room) and floor[other] >= floor[room]:
                    wrong.append(f"{module} ({room}) imports {imported} ({other})")

    assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
        assert (ROOT / target).exists(), target


def test_named_tests_exist() -> None:
    """Pages name a test by the end of its path."""
    named = {
        name
        for page in (ROOT / "docs").glob("*.md")
        for name in re.findall(r"`((?:\w+/)*test_\w+\.py)`", page.read_text())
    }
    paths = [str(path) for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(named) > 20
    assert {name for name in named if not any(p.endswith(f"/{name}") for p in paths)} == set()


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
