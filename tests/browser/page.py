"""A headless Chromium and its pages, over the Chrome DevTools Protocol."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-port=0",
]
WIDTH, HEIGHT = 1600, 1000
DEADLINE_S = 60.0
POLL_S = 0.05
STILL_S = 0.5

DEEP_JS = """
const deep = {
  all(selector, root = document) {
    const hosts = [...root.querySelectorAll('*')].filter((element) => element.shadowRoot);
    return [
      ...root.querySelectorAll(selector),
      ...hosts.flatMap((host) => deep.all(selector, host.shadowRoot)),
    ];
  },
  text(node = document) {
    if (node instanceof Text) {
      const shown = node.parentElement?.checkVisibility({visibilityProperty: true});
      return shown ? node.data.trim() : '';
    }
    if (node.matches?.('style, script, template')) return '';
    const slotted = node.assignedNodes?.({flatten: true}) ?? [];
    const children = slotted.length ? slotted : [...(node.shadowRoot ?? node).childNodes];
    return children.map((child) => deep.text(child)).filter(Boolean).join('\\n');
  },
};
"""
"""In every page: querySelectorAll and visible text, through open shadow roots."""

Value = TypeVar("Value")


class Page:
    """One tab of the browser."""

    def __init__(self, target: Target) -> None:
        self._target = target
        target.call("Page.enable")
        target.call("Network.enable")
        target.call("Page.addScriptToEvaluateOnNewDocument", source=DEEP_JS)
        target.call(
            "Emulation.setDeviceMetricsOverride",
            width=WIDTH,
            height=HEIGHT,
            deviceScaleFactor=1,
            mobile=False,
        )

    def open(self, url: str) -> None:
        self._target.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON gives it; a promise is awaited."""
        answer = self._target.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str, condition: Callable[[Any], object] = bool) -> Any:
        """The first value of the expression that meets the condition."""
        try:
            return wait_until(lambda: self.evaluate(expression), condition, expression)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; the page shows\n{self.text()}") from None

    def text(self) -> str:
        """All visible text, a line for each piece."""
        text: str = self.evaluate("deep.text()")
        return text

    def screenshot(self, path: Path) -> None:
        """What is on the screen, once it is still: charts are drawn after their text."""
        last, shot = None, self._shot()
        while shot != last:
            time.sleep(STILL_S)
            last, shot = shot, self._shot()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot))

    def _shot(self) -> str:
        png: str = self._target.call("Page.captureScreenshot")["data"]
        return png

    @property
    def requests(self) -> list[str]:
        """The URLs asked for so far."""
        return [
            event["params"]["request"]["url"]
            for event in self._target.events
            if event["method"] == "Network.requestWillBeSent"
        ]


@dataclass(frozen=True, slots=True)
class Browser:
    """A running Chromium."""

    address: str
    target: Target

    @classmethod
    @contextmanager
    def started(cls) -> Iterator[Browser]:
        """With a fresh profile, and no host within reach but this one."""
        with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
            with Program.started(command, Path(profile) / "log") as chromium:
                address, path = chromium.wait_for(r"listening on (ws://[\d.:]+)(/\S+)\n")
                with _target(address + path) as target:
                    yield cls(address, target)

    @contextmanager
    def page(self) -> Iterator[Page]:
        """A new tab, closed when the block is left."""
        target_id = self.target.call("Target.createTarget", url="about:blank")["targetId"]
        try:
            with _target(f"{self.address}/devtools/page/{target_id}") as target:
                yield Page(target)
        finally:
            self.target.call("Target.closeTarget", targetId=target_id)


class Target:
    """What the protocol is spoken with: the browser, or one of its pages."""

    def __init__(self, socket: ClientConnection) -> None:
        self.events: list[dict[str, Any]] = []
        self._socket = socket
        self._ids = itertools.count(1)

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """The answer; events that come before it are kept."""
        call_id = next(self._ids)
        self._socket.send(json.dumps({"id": call_id, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=DEADLINE_S))
            if "method" in message:
                self.events.append(message)
            elif message.get("id") == call_id:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result


@contextmanager
def _target(url: str) -> Iterator[Target]:
    with connect(url, proxy=None, max_size=None, ping_interval=None) as socket:
        yield Target(socket)


@dataclass(frozen=True, slots=True)
class Program:
    """A running program and what it prints."""

    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    @contextmanager
    def started(cls, command: list[str], log: Path) -> Iterator[Program]:
        """It and all that it starts end when the block is left."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            yield cls(process, log)
        finally:
            for signum in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, signum)
                    process.wait(10)

    def wait_for(self, pattern: str) -> tuple[str, ...]:
        """The groups of the pattern, once it is printed."""

        def groups() -> tuple[str, ...]:
            ended = self.process.poll() is not None
            printed = self.log.read_text()
            found = re.search(pattern, printed)
            if ended and not found:
                raise RuntimeError(f"{self.process.args!r} ended: {printed}")
            return found.groups() if found else ()

        return wait_until(groups, bool, pattern)


def wait_until(read: Callable[[], Value], condition: Callable[[Value], object], what: str) -> Value:
    """The first value read that meets the condition."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition(value := read()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} is still {value!r} after {DEADLINE_S:.0f} s")
        time.sleep(POLL_S)
    return value
