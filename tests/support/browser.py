"""A real browser without a screen, which tells of every request and every complaint."""

import base64
import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from tests.support.tools import require_tool

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-extensions", "--disable-default-apps", "--metrics-recording-only",
    "--force-device-scale-factor=1",
)  # fmt: skip


class Browser:
    """driver: selenium's."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def resize(self, width: int, height: int) -> None:
        """Of the page, not of the window."""
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )

    def scheme(self, name: str) -> None:
        """dark or light."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def text(self, selector: str) -> str:
        script = "return document.querySelector(arguments[0]).textContent"
        return str(self.driver.execute_script(script, selector))

    def authorize(self, key: str) -> None:
        """From now on every request carries the key, as after a password prompt."""
        password = base64.b64encode(f"any:{key}".encode()).decode()
        self.driver.execute_cdp_cmd("Network.enable", {})
        headers = {"Authorization": f"Basic {password}"}
        self.driver.execute_cdp_cmd("Network.setExtraHTTPHeaders", {"headers": headers})

    def value(self, tile: str) -> float:
        """The number on a tile of the dashboard page; NaN while there is none."""
        script = """
            const tiles = [...document.querySelectorAll(".tile")];
            const tile = tiles.find((one) => one.querySelector("h2").textContent === arguments[0]);
            return tile ? parseFloat(tile.querySelector(".value span").textContent) : NaN;"""
        found = self.driver.execute_script(script, tile)
        return math.nan if found is None else float(found)

    def pixels(self, canvas: str) -> str:
        """What a canvas shows, as text to compare."""
        script = "return document.querySelector(arguments[0]).toDataURL()"
        return str(self.driver.execute_script(script, canvas))

    def count(self, selector: str) -> int:
        """Elements on the page."""
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def complaints(self) -> list[str]:
        """What the console holds: errors and warnings since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses of everything the page has asked for since the last call; not what the
        browser's own first tab is made of."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        own = ("chrome:", "chrome-untrusted:", "data:")
        return [url for url in found if not url.startswith(own)]


@contextmanager
def browser(width: int = 1280, height: int = 800) -> Iterator[Browser]:
    """Skips the test, or fails it in CI, when there is no Chromium."""
    chromium, driver_path = require_tool("chromium"), require_tool("chromedriver")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = Options()
        options.binary_location = str(chromium)
        for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(str(driver_path)))
        try:
            found = Browser(driver)
            found.resize(width, height)
            yield found
        finally:
            driver.quit()
