"""A real Chromium (Qt WebEngine), driven by its DevTools protocol: open pages, evaluate JavaScript, press keys."""

import json
import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.processes import wait_until
from websockets.sync.client import ClientConnection, connect

from coldstart.system.ipc.addresses import find_free_port

_HERE = Path(__file__).parent
_ENVIRONMENT = _HERE.parents[1] / ".cache" / "chromium"
_PATIENCE_S = 120.0


def find_python() -> Path | None:
    """Return the interpreter that has Chromium, or None where `fetch-chromium.sh` has not made it."""
    python = Path(os.environ.get("COLDSTART_CHROMIUM") or _ENVIRONMENT / "bin" / "python")
    return python if python.exists() else None


def axe_source(python: Path) -> str:
    """Return the JavaScript of axe-core, which looks for barriers in a page."""
    (file,) = python.parents[1].glob("lib/python3*/site-packages/axe_playwright_python/axe.min.js")
    return file.read_text(encoding="utf-8")


class Page:
    """The page of one browser."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._number = socket, 0
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol and return its result; events that arrive meanwhile are kept.

        Raises:
            RuntimeError: The browser refused the call.
        """
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": arguments}))
        while (message := self._receive()).get("id") != self._number:
            self.events.append(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        return dict(message["result"])

    def _receive(self) -> dict[str, Any]:
        return dict(json.loads(self._socket.recv(timeout=_PATIENCE_S)))

    def open(self, url: str) -> None:
        """Open a page and wait until it is loaded. What the former page reports while it ends is discarded."""
        self._navigate("about:blank")
        self._navigate(url)

    def _navigate(self, url: str) -> None:
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(one.get("method") == "Page.loadEventFired" for one in self.events):
            self.events.append(self._receive())

    def show(self, *, width: int, dark: bool = False, height: int = 900) -> None:
        """Give the page a width in CSS pixels and a colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited.

        Raises:
            RuntimeError: The script threw.
        """
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            thrown = done["exceptionDetails"]
            raise RuntimeError(thrown.get("exception", {}).get("description") or thrown["text"])
        return done["result"].get("value")

    def wait_until(self, script: str) -> None:
        """Wait until a JavaScript expression is true. Raises AssertionError."""
        wait_until(lambda: self.evaluate(f"Boolean({script})"), _PATIENCE_S)

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key, such as ("Tab", 9); a button takes Enter only with its text, "\\r"."""
        given = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **given)
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def errors(self) -> list[str]:
        """Return what the page's scripts threw, and what the browser logged as an error, since it was opened."""
        self.evaluate("1")  # receive what is under way
        thrown = [one["params"] for one in self.events if one.get("method") == "Runtime.exceptionThrown"]
        logged = [one["params"]["entry"] for one in self.events if one.get("method") == "Log.entryAdded"]
        return [json.dumps(one) for one in thrown] + [
            one["text"] for one in logged if one["level"] == "error"
        ]


@contextmanager
def browser(python: Path) -> Iterator[Page]:
    """Run a browser with one blank page; it ends with the block.

    Names that end in .test lead to this machine, so that a page can be of another origin.
    """
    with tempfile.TemporaryDirectory(prefix="chromium-") as home, tempfile.TemporaryFile() as log:
        port = find_free_port()
        environment = {"HOME": home, "XDG_RUNTIME_DIR": home, "PATH": os.environ["PATH"]}
        process = subprocess.Popen(
            [python, "-P", _HERE / "chromium_window.py", str(port)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            with connect(_devtools(process, port), max_size=None, open_timeout=_PATIENCE_S) as socket:
                yield Page(socket)
        finally:
            process.kill()
            process.wait()


def _devtools(process: subprocess.Popen[bytes], port: int) -> str:
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(f"Chromium ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
                return str(json.load(answer)[0]["webSocketDebuggerUrl"])
        except (OSError, IndexError):
            time.sleep(0.1)
    raise TimeoutError("Chromium's DevTools do not answer")
