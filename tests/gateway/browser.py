"""Control a headless browser over two pipes with Chrome's DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def browser_path() -> str:
    return next((found for name in _NAMES if (found := shutil.which(name))), "")


with_browser = pytest.mark.skipif(not browser_path(), reason="no chromium is installed")


@contextmanager
def headless(profile: Path) -> Iterator[BrowserPage]:
    """Yield an empty page; close it and end its browser afterwards."""
    to_browser, our_end = os.pipe()
    our_start, from_browser = os.pipe()

    def give_pipes() -> None:
        """The browser reads from descriptor 3 and writes to 4. Copy the pipes first, because dup2 may close a pipe."""
        low, high = os.dup(to_browser), os.dup(from_browser)
        os.dup2(low, 3)
        os.dup2(high, 4)

    process = subprocess.Popen(
        [browser_path(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False,
        preexec_fn=give_pipes,
    )  # fmt: skip
    os.close(to_browser)
    os.close(from_browser)
    with open(our_end, "wb", buffering=0) as out, open(our_start, "rb") as come:
        try:
            yield BrowserPage(out, come)
        finally:
            process.terminate()
            process.wait(60)


class BrowserPage:
    """A browser page. `errors`: exceptions of the page's scripts, and errors on the page's console."""

    def __init__(self, out: BinaryIO, come: BinaryIO) -> None:
        self._out = out
        self._come = come
        self._numbers = itertools.count(1)
        self._session = ""
        self.errors: list[str] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime"):
            self._ask(f"{domain}.enable")

    def open(self, url: str, *, width: int = 1280, height: int = 800) -> None:
        self.resize(width=width, height=height)
        self._ask("Page.navigate", url=url)

    def resize(self, *, width: int, height: int = 800) -> None:
        sizes = {"width": width, "height": height}
        self._ask("Emulation.setDeviceMetricsOverride", **sizes, deviceScaleFactor=1, mobile=False)

    def darken(self, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])

    def text(self, place: str) -> str:
        return self.value(f"document.querySelector('{place}')?.innerText ?? ''")

    def value(self, script: str) -> Any:
        found = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path: Path) -> Path:
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"]))
        return path

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while (found := self._read()).get("id") != number:
            self._note(found)
        assert "error" not in found, (method, found)
        return dict(found["result"])

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:2000])
        if event.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(json.dumps(params["args"])[:2000])

    def _read(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._come.read(1)) != b"\0":
            assert byte, "the browser has ended"
            data += byte
        return dict(json.loads(data))
