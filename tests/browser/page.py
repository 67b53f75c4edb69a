"""Helpers beside Playwright: they read text within shadow roots and wait for values."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from playwright.sync_api import Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTH, HEIGHT = 1600, 1000
DEADLINE_S = 300.0
POLL_S = 0.05
STILL_S = 0.5

DEEP_JS = """
globalThis.deep = {
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
"""Defines, in every page, querySelectorAll and visible text that reach through shadow roots."""

Value = TypeVar("Value")


def wait_for(page: Page, expression: str, condition: Callable[[Any], object] = bool) -> Any:
    """Return the first value of a JavaScript expression that meets the condition."""
    try:
        return wait_until(lambda: page.evaluate(expression), condition, expression)
    except TimeoutError as error:
        raise TimeoutError(f"{error}; the page shows\n{page.evaluate('deep.text()')}") from None


def wait_until(read: Callable[[], Value], condition: Callable[[Value], object], what: str) -> Value:
    """Return the first value read that meets the condition."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition(value := read()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} is still {value!r} after {DEADLINE_S:.0f} s")
        time.sleep(POLL_S)
    return value


def save_screenshot(page: Page, path: Path) -> None:
    """Save what is on the screen once it is still: charts are drawn after their text."""
    last = None
    while (shot := page.screenshot()) != last:
        last = shot
        page.wait_for_timeout(1e3 * STILL_S)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(shot)
