"""A headless Chromium, and what it reports about a page."""

from __future__ import annotations

import base64
import json
import shutil
import time
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
_FLAGS = (
    "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync", "disable-dev-shm-usage", "hide-scrollbars",
)  # fmt: skip
_SETTLED = 30.0  # seconds for the accessibility tree, which takes 0.1 s on an idle machine
_STRUCTURE = ("heading", "navigation", "main", "contentinfo")


class Browser:
    """Shows one page at a time, `wide` pixels across; each log line and each request is returned only once."""

    def __init__(self, folder: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for flag in (*_FLAGS, f"user-data-dir={folder}"):
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))

    def close(self) -> None:
        self.driver.quit()

    def open(self, address: str, wide: int = 1400, scheme: str = "light", media: str = "screen") -> None:
        self.say(
            "Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}]
        )
        self.say("Emulation.setDeviceMetricsOverride", width=wide, height=900, deviceScaleFactor=1, mobile=False)
        self.driver.get(address)

    def say(self, command: str, **arguments: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.driver.execute_cdp_cmd(command, arguments)
        return found

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def accessible(self) -> list[tuple[str, str]]:
        """Return role and name of every node of the accessibility tree.

        Chromium computes the tree after the page is loaded, in parts: it is read until two readings agree and it holds
        the page's headings and landmarks, or until _SETTLED.
        """
        expected = self.run("return document.querySelectorAll('h1, h2, h3, h4, h5, h6, nav, main, footer').length")
        end, before = time.monotonic() + _SETTLED, list[tuple[str, str]]()
        while True:
            nodes = self.say("Accessibility.getFullAXTree")["nodes"]
            found = [
                (node["role"]["value"], node.get("name", {}).get("value", ""))
                for node in nodes
                if not node.get("ignored")
            ]
            whole = sum(role in _STRUCTURE for role, _ in found) >= expected
            if (whole and found == before) or time.monotonic() > end:
                return found
            before = found
            time.sleep(0.1)

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self._log("browser")]

    def requests(self) -> list[str]:
        """Return every URL that the page requested, except data: URLs and pages of the browser itself."""
        events = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        addresses = [one["request"]["url"] for one in sent]
        return [address for address in addresses if not address.startswith(("data:", "chrome:", "about:"))]

    def _log(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.driver.get_log(kind)  # type: ignore[no-untyped-call]
        return found

    def shoot(self, file: Path) -> None:
        """Write a picture of the whole page to `file`, as PNG."""
        wide, high = self.run("const e = document.documentElement; return [innerWidth, e.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": wide, "height": high, "scale": 1}
        taken = self.say("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(taken["data"]))
