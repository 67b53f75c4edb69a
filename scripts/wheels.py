"""Install on machines without network: a folder of wheels, filled elsewhere.

    python scripts/wheels.py fill FOLDER --requirements requirements/cuda.txt   # in a clone, online
    python FOLDER/wheels.py install --venv .venv                                # without network

`fill` downloads the wheels for a Python and a platform, `--part-gb` packs them into files of at
most that size, and a copy of this script goes with them. It needs the standard library alone.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

WHEELS, REQUIREMENTS, CHECKSUMS = "wheels", "requirements.txt", "SHA256SUMS"

PACK = 'tar --create --directory "$0" . | split --bytes "$1" -d --suffix-length 3 - wheels.tar.'
UNPACK = 'cat wheels.tar.* | tar --extract --directory "$0"'

SOURCE_ONLY = ("antlr4-python3-runtime==4.9.3",)
"""Packages without a wheel on PyPI. They are pure Python, so one that is built fits everywhere."""

ALIASES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
"""Older names of platforms, by the second number of their glibc."""


def platforms(newest: str) -> list[str]:
    """Return a platform, and the older ones whose wheels run on it, which pip does not derive."""
    parts = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", newest)
    if parts is None:
        return [newest]
    minor, machine = int(parts[1]), parts[2]
    names = [f"manylinux_2_{older}_{machine}" for older in range(minor, 4, -1)]
    return names + [f"{alias}_{machine}" for glibc, alias in ALIASES.items() if glibc <= minor]


def read_requirements(path: Path) -> tuple[list[str], list[tuple[Path, str]]]:
    """Return the packages of one of requirements/, and the folders to build with their extras."""
    packages, ours = [], []
    for line in path.read_text().splitlines():
        word = line.partition("#")[0].removeprefix("-e ").strip()
        if word.startswith("."):
            folder, bracket, extras = word.partition("[")
            ours.append((path.resolve().parents[1] / folder, bracket + extras))
        elif word:
            packages.append(word)
    return packages, ours


def fill(folder: Path, requirements: Path, python: str, platform: str, part_gb: float) -> None:
    """Fill a new folder with all wheels that some requirements need.

    Args:
        python: version of the Python that will use them, such as 3.11.
        platform: newest platform tag that it supports, such as manylinux_2_28_x86_64.
        part_gb: size of the parts in 10**9 B; 0 for the wheels as they are.
    """
    wheels = folder.resolve() / WHEELS
    wheels.mkdir(parents=True)
    packages, ours = read_requirements(requirements)
    for source, extras in ours:
        before = {*wheels.iterdir()}
        pip("wheel", "--no-deps", "--wheel-dir", wheels, source)
        (built,) = {*wheels.iterdir()} - before
        name, version, *_ = built.name.split("-")
        packages.append(f"{name}{extras}=={version}")
    pip("wheel", "--no-deps", "--wheel-dir", wheels, *SOURCE_ONLY)
    (folder / REQUIREMENTS).write_text("\n".join(packages) + "\n")
    pip(
        *("download", "--only-binary", ":all:", "--python-version", python),
        *(word for name in platforms(platform) for word in ("--platform", name)),
        *("--find-links", wheels, "--dest", wheels, "--requirement", folder / REQUIREMENTS),
    )
    if part_gb:
        run("bash", "-o", "pipefail", "-c", PACK, wheels, int(part_gb * 1e9), folder=folder)
        shutil.rmtree(wheels)
    shutil.copy(__file__, folder / "wheels.py")
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    sums = subprocess.run(["sha256sum", *files], cwd=folder, stdout=subprocess.PIPE, check=True)
    (folder / CHECKSUMS).write_bytes(sums.stdout)


def install(folder: Path, environment: Path) -> None:
    """Install from a filled folder into an environment, which is made if it is not there."""
    run("sha256sum", "--quiet", "--check", CHECKSUMS, folder=folder)
    python = environment.absolute() / "bin" / "python"
    if not python.exists():
        venv.create(environment, with_pip=True)
    with tempfile.TemporaryDirectory(dir=environment) as unpacked:
        wheels = folder / WHEELS
        if not wheels.is_dir():
            wheels = Path(unpacked).absolute()
            run("bash", "-o", "pipefail", "-c", UNPACK, wheels, folder=folder)
        found = ("--no-index", "--find-links", wheels, "--requirement", folder / REQUIREMENTS)
        pip("install", *found, python=python)
    run(python.with_name("dlrm-check-install"))


def pip(*arguments: object, python: Path | str = sys.executable) -> None:
    run(python, "-m", "pip", "--quiet", *arguments)


def run(*command: object, folder: Path | None = None) -> None:
    subprocess.run([*map(str, command)], cwd=folder, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    filling = commands.add_parser("fill", help="download wheels, on a machine with network")
    filling.add_argument("folder", type=Path, help="folder to make")
    filling.add_argument("--requirements", type=Path, default=Path("requirements/cuda.txt"))
    filling.add_argument("--python", default=f"{sys.version_info[0]}.{sys.version_info[1]}")
    filling.add_argument("--platform", default=f"manylinux_2_28_{os.uname().machine}")
    filling.add_argument("--part-gb", type=float, default=0, help="size of parts, 0 for no parts")
    installing = commands.add_parser("install", help="install them, without network")
    installing.add_argument("--venv", type=Path, default=Path(".venv"), dest="environment")
    given = vars(parser.parse_args())
    try:
        if given.pop("command") == "fill":
            fill(**given)
        else:
            install(Path(__file__).resolve().parent, **given)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
