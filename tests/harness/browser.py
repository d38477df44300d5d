"""A page in Debian's chromium, without a display: the DevTools protocol over a pipe.

Two file descriptors are all that it needs, so nothing listens on a port:
https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.harness import runner

CHROMIUM = "chromium"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--remote-debugging-pipe", "--hide-scrollbars"),
)
TIMEOUT_S = runner.HANG_S


class Page:
    """A tab: what it is asked, and what it has reported.

    Attributes:
        events: all that the browser has reported of this tab, oldest first.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._unread = b""
        self._asked = 0
        self._session = ""
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.send(f"{domain}.enable")
        self.send("Page.setLifecycleEventsEnabled", enabled=True)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError(f"chromium has said nothing for {TIMEOUT_S:g} s")
            more = os.read(self._from, 2**20)
            if not more:
                raise ConnectionError("chromium has ended")
            self._unread += more
        message, _, self._unread = self._unread.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        if "method" in found:
            self.events.append(found)
        return found

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask the browser, and wait for its answer.

        Raises:
            RuntimeError: it refuses.
        """
        self._asked += 1
        asked = {"id": self._asked, "method": method, "params": params}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        until = time.monotonic() + TIMEOUT_S
        while (found := self._next(until)).get("id") != self._asked:
            pass
        if "error" in found:
            raise RuntimeError(f"{method}: {found['error']}")
        result: dict[str, Any] = found["result"]
        return result

    def open(self, file: Path) -> None:
        """Load a file, and wait until it has loaded; events begin anew."""
        self.events.clear()
        loader = self.send("Page.navigate", url=file.resolve().as_uri())["loaderId"]
        until = time.monotonic() + TIMEOUT_S
        while not any(
            event["method"] == "Page.lifecycleEvent"
            and (event["params"]["loaderId"], event["params"]["name"]) == (loader, "load")
            for event in self.events
        ):
            self._next(until)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, which may be a promise.

        Raises:
            RuntimeError: it throws.
        """
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", found))
        return found["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """A key, by its name and its Windows virtual-key code."""
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def click(self, selector: str) -> None:
        """The middle of the first element that a selector finds."""
        found = f"document.querySelector({json.dumps(selector)})"
        box = self.evaluate(
            f"{found}.scrollIntoView({{block: 'center'}}),"
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({found}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """The window, in pixels, and whether its user prefers dark colors."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 640
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, file: Path) -> None:
        """Write what the window shows, as PNG."""
        found = self.send("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(found["data"]))

    def requested(self) -> list[str]:
        """All addresses that the page has asked for since it was opened."""
        return [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]


@contextlib.contextmanager
def page() -> Iterator[Page]:
    """A tab of a browser of its own, with a new profile."""
    with tempfile.TemporaryDirectory(prefix="brigade-chromium-", ignore_cleanup_errors=True) as profile:
        reads, to_browser = os.pipe()
        from_browser, writes = os.pipe()
        # chromium reads from 3 and writes to 4, which here may be other files; $0 and $1 are ours.
        moved = 'exec 3<&"$0" 4>&"$1"; shift; exec "$@"'
        process = subprocess.Popen(
            ["bash", "-c", moved, str(reads), str(writes), CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(reads, writes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile},
        )
        os.close(reads)
        os.close(writes)
        try:
            yield Page(to_browser, from_browser)
        finally:
            os.close(to_browser)  # then it ends
            os.close(from_browser)
            try:
                process.wait(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=TIMEOUT_S)


if __name__ == "__main__":  # python -m tests.harness.browser docs/explorer.html docs/explorer.png
    with page() as shown:
        shown.resize(1280, 900)
        shown.open(Path(sys.argv[1]))
        shown.screenshot(Path(sys.argv[2]))
