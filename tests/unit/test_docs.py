"""The documentation is true where `zensical build --strict` cannot tell: menu, pictures, rooms."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md"]
SITE = sorted((ROOT / "docs").rglob("*.md"))
ROOM = re.compile(r"^\| (\d+) \| \*\*(\w+)\*\* \| (.+) \| (.+) \|$", re.M)
"""Floor and name of a room, what lives there, and what does not."""

README = (ROOT / "README.md").read_text()
LAUNCHERS = ("dlrm_torchx", "hydra_plugins")


def rooms() -> dict[str, tuple[int, str]]:
    """The floor of each room of the architecture's page, and the two sentences on it."""
    found = ROOM.findall((ROOT / "docs" / "architecture.md").read_text())
    return {name: (int(floor), f"{lives} {does_not}") for floor, name, lives, does_not in found}


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


def room_of(module: str) -> str | None:
    """The room of a module or of a name in it; None for other packages and the package's face."""
    package, *parts = module.split(".")
    if package in LAUNCHERS:
        return "launch"
    if package != "dlrm_sharded" or not parts or parts[0] == "__init__" or parts[0][0].isupper():
        return None
    return parts[0]


def test_rooms_import_rooms_of_lower_floors() -> None:
    floors = {room: floor for room, (floor, _) in rooms().items()}
    wrong = []
    for folder, above in (("dlrm_sharded", ROOT), ("launch", ROOT / "launch")):
        for path in (ROOT / folder).rglob("*.py"):
            module = ".".join(path.relative_to(above).with_suffix("").parts)
            room = room_of(module)
            for imported in imported_modules(ast.parse(path.read_text())):
                other = room_of(imported)
                if None not in (room, other) and other != room and floors[other] >= floors[room]:
                    wrong.append(f"{module} ({room}) imports {imported} ({other})")

    assert wrong == []


def test_rooms_are_the_folders() -> None:
    """Beside them lies only the public face."""
    package = ROOT / "dlrm_sharded"
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    face = {path.stem for path in package.glob("*.py")}
    assert face == {"__init__", "testing", "train"}
    assert {*rooms()} == folders | {"launch", "testing", "train"}


def test_a_room_says_what_its_row_says() -> None:
    for name, (_, sentences) in rooms().items():
        path = ROOT / "dlrm_sharded" / name / "__init__.py"
        if path.exists():
            said = ast.get_docstring(ast.parse(path.read_text())) or ""
            assert " ".join(said.split()).startswith(sentences), name


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
        assert (ROOT / target).exists(), target


def test_every_page_is_in_the_menu() -> None:
    menu = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(ROOT / "docs" / page for page in menu) == SITE


@pytest.mark.parametrize("page", SITE, ids=lambda page: page.stem)
def test_pictures_exist(page: Path) -> None:
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text()):
        assert (page.parent / picture).exists(), picture


def test_both_examples_of_sharded_planner_are_one() -> None:
    """`tests/distributed/test_planner.py` runs the README's."""
    example = r"^    from dlrm_sharded import .*?\n\n(?=\S)"
    pages = [ROOT / "README.md", ROOT / "docs" / "guide" / "torchrec.md"]
    ours, theirs = (re.findall(example, page.read_text(), re.M | re.S) for page in pages)
    assert ours == theirs


def test_named_tests_exist() -> None:
    """Pages name a test by the end of its path."""
    named = {
        name for page in SITE for name in re.findall(r"`((?:\w+/)*test_\w+\.py)`", page.read_text())
    }
    paths = [str(path) for path in (ROOT / "tests").rglob("test_*.py")]
    assert named
    assert {name for name in named if not any(p.endswith(f"/{name}") for p in paths)} == set()


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_what_ran_on_gpus_is_told_in_one_sentence() -> None:
    """README's status line; pages that speak of GPUs have the same sentence, and none denies it."""
    (status,) = re.findall(r"^\*\*Status: alpha\.\*\* (.+ never have\.)$", README, re.M)
    for page in ("index.md", "guide/training.md"):
        text = (ROOT / "docs" / page).read_text()
        assert status in " ".join(text.split()), page
    denials = r"nobody has run|no GPUs? (was|were) at hand|has run on a GPU yet|timed on a GPU here"
    assert {page.name for page in SITE if re.search(denials, page.read_text())} == set()
    assert not re.search(denials, README)


def test_files_that_contributors_are_sent_to_are_there():
    named = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_0-9]+\.py)?)`", (ROOT / "AGENTS.md").read_text())
    assert named
    places = [ROOT, ROOT / "dlrm_sharded"]
    assert [n for n in named if not any((place / n).exists() for place in places)] == []
