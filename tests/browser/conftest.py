"""TensorBoard on a finished sweep, and a browser. SCREENSHOTS=folder keeps what it saw."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.page import CHROMIUM, DEEP_JS, HEIGHT, WIDTH, save_screenshot, wait_until

FLAGS = [
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
"""Chromium's flags that Playwright does not set; the last puts all other hosts out of reach."""

LIMIT_MS = 600_000
"""Playwright waits for 30 s, which is too short for a busy machine."""

LOCAL = ("http://127.0.0.1:", "blob:http://127.0.0.1:", "data:", "about:blank")


@pytest.fixture(scope="session")
def results(finished_sweep: Path) -> dict[str, dict[str, Any]]:
    """Fields of result.json by the run's name."""
    files = sorted(finished_sweep.glob("*/result.json"))
    return {file.parent.name: json.loads(file.read_text()) for file in files}


@pytest.fixture(scope="session")
def tensorboard(finished_sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a running TensorBoard."""
    log = tmp_path_factory.mktemp("tensorboard") / "log"
    command = [sys.executable, "-m", "tensorboard.main", f"--logdir={finished_sweep}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host=127.0.0.1", "--port=0"],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def address() -> re.Match[str] | None:
        assert process.poll() is None, log.read_text()
        return re.search(r"at (http://127\.0\.0\.1:\d+/)", log.read_text())

    try:
        found = wait_until(address, bool, "TensorBoard's address")
        assert found
        yield found[1]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")  # Playwright's event loop must be gone before other tests run one
def browser() -> Iterator[Browser]:
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(
            executable_path=CHROMIUM, chromium_sandbox=False, args=FLAGS, timeout=LIMIT_MS
        ) as browser,
    ):
        yield browser


@pytest.fixture
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page with a fresh profile, which must not have asked any other machine for anything."""
    urls: list[str] = []
    with browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}) as context:
        context.set_default_timeout(LIMIT_MS)
        context.on("request", lambda asked: urls.append(asked.url))
        context.add_init_script(DEEP_JS)
        page = context.new_page()
        yield page
        if folder := os.environ.get("SCREENSHOTS"):
            save_screenshot(page, Path(folder) / f"{request.node.name.replace('/', '-')}.png")
    assert urls
    assert [url for url in urls if not url.startswith(LOCAL)] == []
