"""A headless Chromium over the DevTools protocol through two pipes: no socket, no driver, no package."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_S = 60.0
AXE = find_spec("axe_core_python")
SERIOUS = """axe.run(document, {resultTypes: ["violations"]}).then((found) => found.violations
  .filter((one) => ["serious", "critical"].includes(one.impact)).map((one) => one.id + ": " + one.nodes[0].html.slice(0, 200)))"""


class BrowserError(Exception):
    """What the page or the protocol says is wrong."""


class Browser:
    """One browser with one page. `requests`: the addresses that the page asked for. `problems`: its errors."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        hears, self._write = os.pipe()
        self._read, says = os.pipe()
        command = (
            f"exec '{CHROMIUM}' --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars "
            f"--no-first-run --disable-extensions --disable-background-networking --allow-file-access-from-files "
            f"--user-data-dir='{self._folder.name}' --remote-debugging-pipe about:blank 3<&{hears} 4>&{says}"
        )
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", command], pass_fds=(hears, says), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(hears)
        os.close(says)
        self._ids, self._buffer, self._session = itertools.count(1), b"", ""
        self.requests: list[str] = []
        self.problems: list[str] = []
        targets = self.send("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)
        self._process.terminate()
        self._process.wait(20)
        os.close(self._read)
        self._folder.cleanup()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask, and wait for the answer; events on the way are kept."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session and not method.startswith("Target."):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == number:
                if "error" in found:
                    raise BrowserError(f"{method}: {found['error']}")
                return found["result"]
            self._keep(found)

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self._read, 1 << 16) if ready else b""
            if not part:
                raise BrowserError("the browser does not answer")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _keep(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description", details["text"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(params["entry"]["text"])

    def open(self, address: str) -> None:
        """Open an address and wait until its script is through."""
        self.send("Page.navigate", url="about:blank")
        self.requests.clear()
        self.problems.clear()
        self.send("Page.navigate", url=address)
        self.wait("document.documentElement?.dataset.ready === 'yes'")

    def wait(self, condition: str) -> None:
        """Until an expression of the page is true."""
        end = time.monotonic() + PATIENCE_S
        while not self.ask(f"Boolean({condition})"):
            if time.monotonic() > end or self.problems:
                raise BrowserError(f"{condition} does not come true: {self.problems}")
            time.sleep(0.02)

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise BrowserError(found["exceptionDetails"].get("exception", {}).get("description", expression))
        return found["result"].get("value")

    def judged(self) -> list[str]:
        """What axe-core finds serious or worse on the page."""
        if AXE is None or AXE.origin is None:
            return []
        self.ask(Path(AXE.origin).with_name("axe.min.js").read_text(encoding="utf-8") + ";0")
        found: list[str] = self.ask(SERIOUS)
        return found

    def key(self, key: str, text: str = "") -> None:
        """Press a key."""
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def point(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def size(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """The window's size in pixels, and the theme that the system asks for."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def shot(self, path: Path, *, whole: bool = True) -> None:
        """A picture of the page."""
        data = (
            self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
            if not whole
            else self._whole()
        )
        path.write_bytes(base64.b64decode(data))

    def _whole(self) -> str:
        height = self.ask("document.documentElement.scrollHeight")
        width = self.ask("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, 14_000), "scale": 1}
        return self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
