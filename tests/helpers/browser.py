"""A real Chromium without a screen, driven through WebDriver: Debian's, installed if need be."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.site import PATIENCE_S, until

# The size of what it shows, in pixels.
SIZE = (1280, 800)
# What WebDriver calls a reference to an element (W3C, 12.1).
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_PACKAGES = ("chromium", "chromium-driver")


class Browser:
    """One window."""

    def __init__(self, session: str) -> None:
        """``session``: the address of its WebDriver session."""
        self._session = session

    def open(self, address: str) -> None:
        """Open a page, and wait until its first documents are loaded."""
        _ask("POST", f"{self._session}/url", url=address)

    def run(self, script: str) -> Any:
        """What a JavaScript function with this body returns on the page."""
        return _ask("POST", f"{self._session}/execute/sync", script=script, args=[])

    def wait_for(self, script: str, condition: Callable[[Any], bool]) -> None:
        """Wait until what the function returns meets a condition; otherwise, the error has that and the page's text."""
        try:
            until(lambda: condition(self.run(script)), script)
        except AssertionError as error:
            shown = f"{self.run(script)}\n{self.run('return document.body.innerText')}"
            raise AssertionError(f"{error}\n{shown}") from None

    def before_pages(self, script: str) -> None:
        """Run a script in each page that is opened from now on, before its own ones."""
        order = {"cmd": "Page.addScriptToEvaluateOnNewDocument", "params": {"source": script}}
        _ask("POST", f"{self._session}/goog/cdp/execute", **order)

    def complaints(self) -> list[str]:
        """The errors and warnings in its console, since the last call."""
        entries = _ask("POST", f"{self._session}/se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """The addresses on a network that it has asked for since the last call, whatever came of it."""
        entries = _ask("POST", f"{self._session}/se/log", type="performance")
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        sent = [each["params"] for each in messages if each["method"] == "Network.requestWillBeSent"]
        addresses = [each["request"]["url"] for each in sent]
        # Its own first tab, and what a page brings along.
        return [each for each in addresses if not each.startswith(("chrome:", "data:", "blob:"))]

    def click(self, selector: str) -> None:
        """Click on the first element that a selector matches, as a person does."""
        _ask("POST", f"{self._element(selector)}/click")

    def point_at(self, selector: str, x: int = 0, y: int = 0, *, clicks: bool = False) -> None:
        """Move the pointer to so many pixels from the middle of the first element that a selector matches; click there.

        Args:
            selector: The selector.
            x: Pixels to the right.
            y: Pixels down.
            clicks: Also click.
        """
        element = {_ELEMENT: self._element(selector).rpartition("/")[2]}
        actions: list[dict[str, Any]] = [{"type": "pointerMove", "duration": 0, "x": x, "y": y, "origin": element}]
        if clicks:
            actions += [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'nearest'}})")
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": actions}
        _ask("POST", f"{self._session}/actions", actions=[pointer])

    def _element(self, selector: str) -> str:
        """The address of an element."""
        element = _ask("POST", f"{self._session}/element", using="css selector", value=selector)
        return f"{self._session}/element/{element[_ELEMENT]}"

    def emulate(self, **features: str) -> None:
        """Have a page think of other ``media``, or of what a user prefers, such as ``prefers_color_scheme``."""
        media = features.pop("media", "")
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        order = {"cmd": "Emulation.setEmulatedMedia", "params": {"media": media, "features": named}}
        _ask("POST", f"{self._session}/goog/cdp/execute", **order)

    def picture(self, height: int | None = None) -> bytes:
        """What is visible, as PNG; ``height``: so many pixels from the page's beginning instead."""
        if height is None:
            return base64.b64decode(_ask("GET", f"{self._session}/screenshot"))
        clip = {"x": 0, "y": 0, "width": SIZE[0], "height": height, "scale": 1}
        order = {"cmd": "Page.captureScreenshot", "params": {"captureBeyondViewport": True, "clip": clip}}
        return base64.b64decode(_ask("POST", f"{self._session}/goog/cdp/execute", **order)["data"])


@contextlib.contextmanager
def browser(place: Path) -> Iterator[Browser]:
    """A browser whose files are in ``place``. Skips the test where there is none, and none can be installed."""
    _install()
    with (place / "chromedriver.log").open("w+") as log:
        command = ["chromedriver", "--port=0"]
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True) as driver:
            try:
                port = _port(log.name)
                width, height = SIZE
                # Chromium's sandbox does not work as root.
                arguments = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"]
                arguments += [f"--user-data-dir={place / 'profile'}"]
                logs = {"browser": "ALL", "performance": "ALL"}
                options = {"goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": logs}
                capabilities = {"alwaysMatch": options}
                server = f"http://127.0.0.1:{port}/session"
                session = f"{server}/{_ask('POST', server, capabilities=capabilities)['sessionId']}"
                try:
                    # Not the window's size, which has a frame.
                    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
                    order = {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics}
                    _ask("POST", f"{session}/goog/cdp/execute", **order)
                    yield Browser(session)
                finally:
                    _ask("DELETE", session)
            finally:
                driver.terminate()


def _port(log: str) -> int:
    """The port that chromedriver has chosen, as it says in its ``log``."""
    match = until(lambda: re.search(r"started successfully on port (\d+)", Path(log).read_text()), "chromedriver")
    return int(match[1])


def _ask(method: str, address: str, **data: Any) -> Any:
    content = json.dumps(data).encode() if method == "POST" else None
    request = urllib.request.Request(address, content, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from error


def _install() -> None:
    if not all(map(shutil.which, ("chromium", "chromedriver"))):
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            pytest.skip(f"there is no Chromium: install Debian's packages {' and '.join(_PACKAGES)}")
        subprocess.run(["apt-get", "update"], capture_output=True, check=False)
        command = ["apt-get", "-o", "DPkg::Lock::Timeout=120", "install", "-y", "--no-install-recommends", *_PACKAGES]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        installation = subprocess.run(command, capture_output=True, check=False, text=True, env=environment)
        if installation.returncode != 0:
            pytest.skip(f"apt-get cannot install Chromium: {installation.stderr.strip()[-300:]}")
