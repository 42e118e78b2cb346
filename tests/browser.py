"""Headless Chromium for tests of pages; skipped, with the reason, where there is none."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

FLAGS = (
    "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync", "disable-dev-shm-usage", "window-size=1300,900",
)  # fmt: skip


class Browser:
    """A page as a person uses it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path) -> None:
        self.driver.get(page.resolve().as_uri())

    def all(self, selector: str) -> list[WebElement]:
        found: list[WebElement] = self.driver.find_elements(By.CSS_SELECTOR, selector)
        return found

    def texts(self, selector: str) -> list[str]:
        return [element.text for element in self.all(selector)]

    def wait(self, selector: str, count: int = 1) -> list[WebElement]:
        """Waits until just so many elements are there."""
        WebDriverWait(self.driver, 60).until(lambda _: len(self.all(selector)) == count)
        return self.all(selector)

    def wait_for(self, selector: str, text: str) -> None:
        """Waits until the only element that is there has this text."""
        patient = WebDriverWait(self.driver, 60, ignored_exceptions=[StaleElementReferenceException])
        patient.until(lambda _: self.texts(selector) == [text])

    def choose(self, select: str, option: str) -> None:
        (found,) = (each for each in self.all(f"{select} option") if each.text.startswith(option))
        found.click()

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def complaints(self) -> list[str]:
        """What the console said since the last time."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Every address that was asked for since the last time, but for the browser's own pages."""
        said = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [each["params"]["request"]["url"] for each in said if each["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith("chrome")]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A new Chromium with a profile of its own."""
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not chromedriver:
        pytest.skip("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(f"--{flag}")
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    driver.get("about:blank")  # leaves the page that a new window begins with
    yield Browser(driver)
    driver.quit()
