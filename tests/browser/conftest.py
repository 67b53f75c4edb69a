"""TensorBoard on a finished sweep, and a browser. SCREENSHOTS=folder keeps what it saw."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.page import Browser, Page, Program

LOCAL = ("http://127.0.0.1:", "blob:http://127.0.0.1:", "data:", "about:blank")


@pytest.fixture(scope="session")
def results(finished_sweep: Path) -> dict[str, dict[str, Any]]:
    """The fields of result.json by the run's name."""
    files = sorted(finished_sweep.glob("*/result.json"))
    return {file.parent.name: json.loads(file.read_text()) for file in files}


@pytest.fixture(scope="session")
def tensorboard(finished_sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    command = [sys.executable, "-m", "tensorboard.main", f"--logdir={finished_sweep}"]
    log = tmp_path_factory.mktemp("tensorboard") / "log"
    with Program.started([*command, "--host=127.0.0.1", "--port=0"], log) as program:
        (address,) = program.wait_for(r"at (http://127\.0\.0\.1:\d+/)")
        yield address


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with Browser.started() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A new tab, which must not have asked any other machine for anything."""
    with browser.page() as page:
        yield page
        if folder := os.environ.get("SCREENSHOTS"):
            page.screenshot(Path(folder) / f"{request.node.name.replace('/', '-')}.png")
        assert page.requests
        assert [url for url in page.requests if not url.startswith(LOCAL)] == []
