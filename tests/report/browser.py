"""A headless Chromium driven by its own protocol over two pipes: no driver, no library, no port."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-headless-shell", "google-chrome", "google-chrome-stable", "chromium-browser")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-extensions",
    "--disable-background-networking",
    "--remote-debugging-pipe",
    "--force-color-profile=srgb",
)


def find() -> str | None:
    """A browser that is one; Ubuntu's /usr/bin/chromium-browser may be a stub that only asks for a snap."""
    for name in NAMES:
        path = shutil.which(name)
        if path:
            with open(path, "rb") as file:
                if b"snap" not in file.read(4096):
                    return path
    return None


class Browser:
    """One browser with one page."""

    def __init__(self, program: str, profile: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        kept = {theirs_in: 3, theirs_out: 4}

        def arrange() -> None:
            high = [os.dup2(fd, 60 + target) for fd, target in kept.items()]
            for fd, target in zip(high, kept.values(), strict=True):
                os.dup2(fd, target, inheritable=True)

        argv = [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            argv,
            preexec_fn=arrange,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._numbers, self._buffer, self.events = itertools.count(1), b"", []
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def open(self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False, media: str = "") -> None:
        """Load a local file in a window of this size and colour scheme."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call(
            "Emulation.setEmulatedMedia",
            media=media,
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def requests(self) -> list[str]:
        """What the page asked for, besides itself."""
        asked = [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        return asked[1:]

    def complaints(self) -> list[str]:
        """What the console said: errors, warnings, violations."""
        return [event["params"]["entry"]["text"] for event in self.events if event.get("method") == "Log.entryAdded"]

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                text="\r" if key == "Enter" else "",
            )

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]))

    def pdf(self, path: Path) -> None:
        path.write_bytes(
            base64.b64decode(
                self.call("Page.printToPDF", printBackground=False, paperWidth=8.27, paperHeight=11.69)["data"]
            )
        )

    def close(self) -> None:
        self._session = ""
        try:
            self.call("Browser.close")
            self.process.wait(timeout=10)
        except (OSError, AssertionError, subprocess.TimeoutExpired):
            os.killpg(self.process.pid, 9)
            self.process.wait()
        os.close(self._in)
        os.close(self._out)

    def _read(self, timeout: float = 200.0) -> dict[str, Any]:
        until = time.monotonic() + timeout
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self._in, 1 << 16) if ready else b""
            assert data, "the browser said nothing more"
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)
