"""A headless Chromium, spoken to through two pipes in the DevTools protocol, so that no driver is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from itertools import count
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class PageChanged(Exception):
    """The page that a script ran in went away before the script had ended."""


class Browser:
    """One page. problems: console errors, exceptions and policy violations. requests: the addresses it asked for."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 900) -> None:
        assert CHROMIUM is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ]
        options += [
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            "--remote-debugging-pipe",
        ]
        # The protocol's pipes are descriptors 3 and 4. The middle numbers keep one copy from replacing the other.
        shell = f'exec 13<&{theirs_in} 14>&{theirs_out} 3<&13 4>&14; exec "$@"'
        words = ["bash", "-c", shell, "bash", CHROMIUM, *options, "about:blank"]
        self._process = subprocess.Popen(
            words, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._left, self._numbers, self._session = b"", count(1), ""
        self._is_loaded = False
        self.problems: list[str] = []
        self.requests: list[str] = []
        [page] = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "navigated or closed" in answer.get("error", {}).get("message", ""):
                    raise PageChanged(answer)
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            piece = os.read(self._in, 1 << 16)
            assert piece, "the browser has ended"
            self._left += piece
        text, _, self._left = self._left.partition(b"\0")
        event = json.loads(text)
        self._note(event.get("method"), event.get("params", {}))
        return event

    def _note(self, method: str | None, event: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._is_loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(event["exceptionDetails"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.problems.append(json.dumps(event["entry"]))
        elif method == "Runtime.consoleAPICalled" and event["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.problems.append(json.dumps(event["args"]))

    def open(self, url: str) -> None:
        """Opens an address, and returns when its page and scripts are loaded."""
        self._is_loaded = False
        self.call("Page.navigate", url=url)
        while not self._is_loaded:
            self._read()

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page, awaited if it is a promise."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 30) -> float:
        """Waits until an expression is true. Returns the seconds that this took."""
        started = time.monotonic()
        while not self._is_true(script):
            assert time.monotonic() - started < seconds, (
                f"not after {seconds} s: {script}; {self.problems}"
            )
            time.sleep(0.05)
        return time.monotonic() - started

    def _is_true(self, script: str) -> bool:
        try:
            return bool(self.evaluate(script))
        except PageChanged:
            return False

    def click(self, x: float, y: float, to: tuple[float, float] | None = None) -> None:
        """Presses the mouse at a place of the window, and lifts it there or after a drag."""
        end = to or (x, y)
        for kind, at in (
            ("mouseMoved", (x, y)),
            ("mousePressed", (x, y)),
            ("mouseMoved", end),
            ("mouseReleased", end),
        ):
            held = {"button": "left", "buttons": 1, "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], **held)

    def screenshot(self) -> bytes:
        """The window as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
