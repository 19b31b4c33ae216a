"""A real browser without a screen, which tells of every request and every complaint."""

import json
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

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def complaints(self) -> list[str]:
        """What the console holds: errors and warnings since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses of everything the page has asked for since the last call."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found


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
