"""A headless Chromium that the tests drive through a pipe with the DevTools protocol, without any library."""

import base64
import json
import os
import shutil
import subprocess
from contextlib import contextmanager, suppress

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
# The browser reads commands from descriptor 3 and writes answers to descriptor 4, each ended by a zero byte.
READS, WRITES = 3, 4


class Browser:
    """One page of a running Chromium."""

    def __init__(self, to_browser, from_browser):
        self._to, self._from, self._number, self._session = to_browser, from_browser, 0, None
        self.problems = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Sends a command and returns its answer. Errors of the page that come before are noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path, width, theme):
        """Shows a file at a width, in the theme "light" or "dark"."""
        self.problems.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.call("Page.navigate", url=path.resolve().as_uri())
        while (event := self._next()).get("method") != "Page.loadEventFired":
            self._note(event)

    def value(self, expression):
        """Returns the value of an expression in JavaScript."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self, path):
        """Writes the whole page as a PNG file."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(picture))

    def _next(self):
        text = bytearray()
        while (byte := self._from.read(1)) != b"\0":
            assert byte, "Chromium has ended"
            text += byte
        return json.loads(text)

    def _note(self, event):
        if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.problems.append(event["params"])


@contextmanager
def running(profile):
    """Starts Chromium with a profile directory of its own, and ends it."""
    commands, to_browser = os.pipe()
    from_browser, answers = os.pipe()
    # The shell gives the pipes the two descriptors. Without the sandbox Chromium also runs as root in a container.
    flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe"
    script = f'exec "$0" {flags} --user-data-dir="$1" {READS}<&{commands} {WRITES}>&{answers}'
    process = subprocess.Popen(
        ["bash", "-c", script, CHROMIUM, str(profile)],
        pass_fds=(commands, answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands)
    os.close(answers)
    with os.fdopen(to_browser, "wb") as outgoing, os.fdopen(from_browser, "rb") as incoming:
        try:
            browser = Browser(outgoing, incoming)
            yield browser
            browser._session = None
            browser.call("Browser.close")
        finally:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
