"""A real Chromium, driven by chromedriver in the few words of WebDriver that tests need."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]


class Browser:
    """One page in one window."""

    def __init__(self, address: str) -> None:
        wanted = {"args": ARGUMENTS, "binary": CHROMIUM}
        logs = {"browser": "ALL", "performance": "ALL"}
        capabilities = {"browserName": "chrome", "goog:chromeOptions": wanted, "goog:loggingPrefs": logs}
        self.address = address
        self.session = ""
        self.session = self.post("/session", {"capabilities": {"alwaysMatch": capabilities}})["sessionId"]

    def post(self, path: str, body: Any, method: str = "POST") -> Any:
        whole = f"{self.address}/session/{self.session}{path}" if self.session else f"{self.address}{path}"
        data = None if method == "DELETE" else json.dumps(body).encode()
        request = urllib.request.Request(whole, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())["value"]

    def size(self, width: int, height: int = 900) -> None:
        values = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", values)

    def media(self, **features: str) -> None:
        self.command("Emulation.setEmulatedMedia", {"features": [{"name": n.replace("_", "-"), "value": v} for n, v in features.items()]})

    def command(self, name: str, values: Any) -> Any:
        return self.post("/goog/cdp/execute", {"cmd": name, "params": values})

    def open(self, page: Path, width: int = 1280) -> None:
        self.size(width)
        self.post("/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *values: Any) -> Any:
        return self.post("/execute/sync", {"script": script, "args": list(values)})

    def run_async(self, script: str) -> Any:
        return self.post("/execute/async", {"script": script, "args": []})

    def keys(self, *keys: str) -> None:
        steps = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.post("/actions", {"actions": [{"type": "key", "id": "keys", "actions": steps}]})

    def point(self, x: float, y: float) -> None:
        moves = [{"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}]
        self.post("/actions", {"actions": [{"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": moves}]})

    def console(self) -> list[str]:
        return [line["message"] for line in self.post("/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """Addresses that were asked for since the last call."""
        found = [json.loads(line["message"])["message"] for line in self.post("/se/log", {"type": "performance"})]
        return [m["params"]["request"]["url"] for m in found if m["method"] == "Network.requestWillBeSent"]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot", {"captureBeyondViewport": True})["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    assert DRIVER is not None
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        assert driver.stdout is not None
        try:
            ports = (re.search(r"started successfully on port (\d+)", line) for line in driver.stdout)
            found = next(port[1] for port in ports if port)
            window = Browser(f"http://127.0.0.1:{found}")
            try:
                yield window
            finally:
                window.post("", None, "DELETE")
        finally:
            driver.terminate()
