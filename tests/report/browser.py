"""A headless Chromium that tests drive by the DevTools protocol, over two pipes: no port, no package."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next((found for name in _NAMES if (found := shutil.which(name))), None)
MISSING = (
    f"needs a Chromium that is on PATH as one of {', '.join(_NAMES)}: `apt-get install chromium`, `dnf install chromium` "
    "or `brew install --cask chromium`"
)
_QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--disable-extensions",
)  # fmt: skip
_TEXTS = {"Enter": "\r", "Space": " "}
_CODES = {"Enter": 13, "Space": 32, "Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Browser:
    """One page. `complaints` are errors and messages of its console, `fetched` the addresses that it asked for."""

    def __init__(self, to_browser: int, from_browser: int, patience_s: float = 60.0) -> None:
        self._out, self._in, self._patience_s = to_browser, from_browser, patience_s
        self._buffer, self._count, self._session = b"", 0, ""
        self.complaints: list[str] = []
        self.fetched: list[str] = []
        self._loads = 0
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(
        self, file: Path, width: int = 1280, height: int = 900, dark: bool = False, script: bool = True, place: str = ""
    ) -> None:
        """Load a file, at a place such as "#top", into a window of that size and wait until it has loaded."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self._call("Emulation.setScriptExecutionDisabled", value=not script)
        loads = self._loads
        self._call("Page.navigate", url=file.as_uri() + place)
        while self._loads == loads:
            self._hear()

    def resize(self, width: int, height: int = 900) -> None:
        """Give the window a size in CSS pixels; up to 600 wide it is a phone's."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width <= 600)

    def media(self, kind: str) -> None:
        """Show the page as on "print" or "screen"."""
        self._call("Emulation.setEmulatedMedia", media=kind)

    def value(self, expression: str) -> Any:
        """Evaluate JavaScript on the page; what it throws is an error here."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until JavaScript is true of the page: what a page does after it has loaded."""
        end = time.monotonic() + self._patience_s
        while not self.value(expression):
            assert time.monotonic() < end, f"not true for {self._patience_s:.0f} s: {expression}"
            time.sleep(0.02)

    def click(self, expression: str) -> None:
        """Press and release the mouse over the middle of an element, wherever it is on the page."""
        x, y = self.value(
            f"(() => {{ const it = {expression}; it.scrollIntoView({{block: 'center', inline: 'center'}});"
            "const box = it.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=int(kind != "mouseMoved"))

    def hover(self, expression: str) -> None:
        """Move the mouse over the middle of an element."""
        x, y = self.value(
            f"(() => {{ const it = {expression}; it.scrollIntoView({{block: 'center'}});"
            "const box = it.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """Press and release a key, by its name."""
        about = {"key": " " if key == "Space" else key, "code": key, "windowsVirtualKeyCode": _CODES[key]}
        text = {"text": _TEXTS[key]} if key in _TEXTS else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", **about)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self._call("Input.insertText", text=text)

    def screenshot(self, whole: bool = False) -> bytes:
        """Return the window, or the whole page, as PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def pdf(self) -> bytes:
        """Return the page as it prints."""
        made = self._call("Page.printToPDF", preferCSSPageSize=True, printBackground=False)
        return base64.b64decode(made["data"])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._hear()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _hear(self) -> dict[str, Any]:
        """Read one message, and take note of what it tells."""
        end = time.monotonic() + self._patience_s
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium said nothing for {self._patience_s:.0f} s"
            data = os.read(self._in, 1 << 20)
            assert data, "Chromium has ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        method, told = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loads += 1
        elif method == "Network.requestWillBeSent":
            self.fetched.append(told["request"]["url"])
        elif method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(json.dumps(told))
        return message


def _high_pipe() -> tuple[int, int]:
    """A pipe whose descriptors are 10 at least."""
    ends = os.pipe()
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return read, write


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Start a browser with a profile of its own, and end it."""
    assert CHROMIUM is not None, MISSING
    # DevTools reads descriptor 3 and writes 4; the shell puts them there, so ours must be others.
    to_browser, from_browser = _high_pipe(), _high_pipe()
    command = f'exec "$0" "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
    process = subprocess.Popen(
        ["/bin/bash", "-c", command, CHROMIUM, *_QUIET, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
        pass_fds=(to_browser[0], from_browser[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Browser(to_browser[1], from_browser[0])
    finally:
        os.close(to_browser[1])  # Chromium ends when its pipe does
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_browser[0])
