"""What `zensical build --strict` does not check: menu, images, packages."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md"]
SITE = sorted((ROOT / "docs").rglob("*.md"))
PACKAGE = re.compile(r"^\| (\d+) \| \*\*(\w+)\*\* \| (.+) \| (.+) \|$", re.M)
"""Layer and name of a package, what it does, and what it does not."""

README = (ROOT / "README.md").read_text()
LAUNCHERS = ("dlrm_torchx", "hydra_plugins")


def packages() -> dict[str, tuple[int, str]]:
    """The layer of each package on the architecture's page, and the two sentences on it."""
    found = PACKAGE.findall((ROOT / "docs" / "architecture.md").read_text())
    return {name: (int(layer), f"{does} {does_not}") for layer, name, does, does_not in found}


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


def package_of(module: str) -> str | None:
    """The package of a module or of a name in it; None for the public API and other projects."""
    project, *parts = module.split(".")
    if project in LAUNCHERS:
        return "launch"
    if project != "dlrm_sharded" or not parts or parts[0] == "__init__" or parts[0][0].isupper():
        return None
    return parts[0]


def test_packages_import_packages_of_lower_layers() -> None:
    layers = {package: layer for package, (layer, _) in packages().items()}
    wrong = []
    for folder, above in (("dlrm_sharded", ROOT), ("launch", ROOT / "launch")):
        for path in (ROOT / folder).rglob("*.py"):
            module = ".".join(path.relative_to(above).with_suffix("").parts)
            package = package_of(module)
            for imported in imported_modules(ast.parse(path.read_text())):
                other = package_of(imported)
                if None in (package, other) or other == package:
                    continue
                if layers[other] >= layers[package]:
                    wrong.append(f"{module} ({package}) imports {imported} ({other})")

    assert wrong == []


def test_packages_are_the_folders() -> None:
    """The public API is beside them, and nothing else."""
    package = ROOT / "dlrm_sharded"
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    public = {path.stem for path in package.glob("*.py")}
    assert public == {"__init__", "testing", "train"}
    assert {*packages()} == folders | {"launch", "testing", "train"}


def test_a_package_says_what_its_row_says() -> None:
    for name, (_, sentences) in packages().items():
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
def test_images_exist(page: Path) -> None:
    for image in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text()):
        assert (page.parent / image).exists(), image


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


def test_what_ran_on_gpus_is_said_in_one_sentence() -> None:
    """README's status line; pages that speak of GPUs have the same sentence, and none denies it."""
    (status,) = re.findall(r"^\*\*Status: alpha\.\*\* (.+ never on several GPUs\.)$", README, re.M)
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
