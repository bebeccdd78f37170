"""Headless Chromium through chromedriver, with the WebDriver standard's plain HTTP requests."""

from __future__ import annotations

import base64
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

CHROMIUM = (
    shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
)
DRIVER = shutil.which("chromedriver")

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
    " --disable-background-networking"
    " --disable-component-update --disable-sync --disable-dev-shm-usage --no-proxy-server"
).split()


class Browser:
    """One window."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http = http
        self._session = session

    def call(self, path: str, **content: Any) -> Any:
        reply = self._http.post(f"/session/{self._session}/{path}", json=content)
        value = reply.json()["value"]
        assert reply.status_code == 200, value
        return value

    def open(self, url: str) -> None:
        self.call("url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns."""
        return self.call("execute/sync", script=script, args=list(arguments))

    def until(self, expression: str, seconds: float = 30.0) -> Any:
        """Wait until an expression is true; its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(f"return {expression}")):
            assert time.monotonic() < end, (
                f"{expression} did not come true; {self.run('return document.body.innerText')}"
            )
            time.sleep(0.05)
        return value

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

    def set(self, selector: str, value: Any) -> None:
        """As a user who types it."""
        self.run(
            "const e = document.querySelector(arguments[0]); e.value = arguments[1];"
            "e.dispatchEvent(new Event('input', {bubbles: true}))",
            selector,
            value,
        )

    def press(self, *keys: str) -> None:
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.call("actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def resize(self, width: int, height: int) -> None:
        """The size of the page, whatever the window is."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=metrics)

    def dark(self, wanted: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if wanted else "light"}
        self.call(
            "goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"features": [feature]}
        )

    def screenshot(self, path: Path) -> None:
        path.write_bytes(
            base64.b64decode(self._http.get(f"/session/{self._session}/screenshot").json()["value"])
        )

    def log(self) -> list[str]:
        """What the console was told, errors alone."""
        entries = self.call("se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser for as long as the context is open."""
    assert CHROMIUM and DRIVER
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        driver = subprocess.Popen(
            [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            with httpx.Client(
                base_url=f"http://127.0.0.1:{port}",
                transport=httpx.HTTPTransport(retries=20),
                timeout=60,
            ) as http:
                options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={profile}"]}
                wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
                started = http.post(
                    "/session", json={"capabilities": {"alwaysMatch": wanted}}
                ).json()["value"]
                assert "sessionId" in started, started
                yield Browser(http, started["sessionId"])
                http.delete(f"/session/{started['sessionId']}")
        finally:
            driver.terminate()
            driver.wait(20)
