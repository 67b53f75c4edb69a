"""The documentation is true where `mkdocs build --strict` cannot tell: links, rooms, lengths."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
ROOM = re.compile(r"^\| \*\*(\w+)\*\*(?: \((.*?)\))? \| .* \| (.*?) *\|$", re.M)
"""Name, modules that are no folder of that name, and the rooms it imports."""


def rooms() -> tuple[dict[str, str], dict[str, set[str]]]:
    """The room of each module that the page names, and the rooms that each room imports."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    room_of, imports = {}, {}
    for name, modules, imported in ROOM.findall(page):
        room_of.update(dict.fromkeys(re.findall(r"`([\w.]+)`", modules), name))
        imports[name] = {room for room in imported.split(", ") if room}
    return room_of, imports


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
    if package in ("dlrm_torchx", "hydra_plugins", "component", "scripts"):
        return room_of.get(package, package)
    if package != "dlrm_sharded" or not parts:
        return None
    return room_of.get(".".join(parts[:2])) or room_of.get(parts[0]) or parts[0]


def test_rooms_import_what_the_architecture_says() -> None:
    room_of, documented = rooms()
    found = defaultdict(set)
    for folder in ("dlrm_sharded", "launch"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            module = ".".join(part for part in parts if part not in ("launch", "__init__"))
            room = room_of_module(module, room_of)
            for imported in imported_modules(ast.parse(path.read_text())):
                other = room_of_module(imported, room_of)
                if room and other and other != room:
                    found[room].add(other)

    del documented["scripts"]
    assert documented.pop("ground") == set()
    assert {room: sorted(imported) for room, imported in found.items()} == {
        room: sorted(imported) for room, imported in documented.items()
    }


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
        assert (ROOT / target).exists(), target


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
