"""A real Chromium without a window, driven over its DevTools protocol by a pipe: pages are opened, typed in and clicked in."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
DEADLINE_S = 60.0


class Page:
    """One tab. `errors` are exceptions of its scripts, and what its policy has refused."""

    def __init__(self, browser: _Pipe, session: str) -> None:
        self._browser, self._session = browser, session
        self.errors: list[str] = []
        browser.listeners[session] = self._heard
        self._answer: Callable[[str], Any] = lambda url: None
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> Any:
        return self._browser.call(method, params, self._session)

    def _heard(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
        elif method == "Log.entryAdded" and params["entry"]["source"] in ("security", "violation"):
            self.errors.append(params["entry"]["text"])
        elif method == "Fetch.requestPaused":
            document = self._answer(params["request"]["url"])
            if document is None:
                self._browser.post("Fetch.continueRequest", {"requestId": params["requestId"]}, self._session)
                return
            body = base64.b64encode(json.dumps(document).encode()).decode()
            answer = {"requestId": params["requestId"], "responseCode": 200, "body": body}
            self._browser.post("Fetch.fulfillRequest", answer, self._session)

    def answer_with(self, answer: Callable[[str], Any]) -> None:
        """Have requests answered by the document that `answer` gives for their URL; None: as the service answers."""
        self._answer = answer
        self.send("Fetch.enable")

    def size(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """The value of an expression; promises are awaited."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait(self, script: str, what: str = "") -> None:
        """Return once an expression is true."""
        until = time.monotonic() + DEADLINE_S
        while not self.evaluate(f"!!({script})"):
            assert time.monotonic() < until, f"waited {DEADLINE_S:.0f} s for: {what or script}\n{self.text()[:3000]}"
            time.sleep(0.05)

    def text(self, selector: str = "body") -> str:
        found: str = self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return found

    def wait_text(self, words: str, selector: str = "body") -> None:
        self.wait(
            f"(document.querySelector({json.dumps(selector)})?.innerText ?? '').includes({json.dumps(words)})", words
        )

    def key(self, key: str, text: str = "") -> None:
        """Press a key, as a person does: the element with the focus gets it."""
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_CODES.get(key, 0), **more
            )

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Click in the middle of an element, which has to be where it can be seen."""
        self.wait(f"document.querySelector({json.dumps(selector)})", selector)
        x, y = self.evaluate(
            f"(() => {{const it = document.querySelector({json.dumps(selector)}); it.scrollIntoView({{block: 'center'}});"
            "const box = it.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def point(self, selector: str, share: float) -> None:
        """Move the pointer over an element, at this share of its width."""
        x, y = self.evaluate(
            f"(() => {{const it = document.querySelector({json.dumps(selector)}); it.scrollIntoView({{block: 'center'}});"
            f"const box = it.getBoundingClientRect(); return [box.x + box.width * {share}, box.y + box.height / 2]}})()"
        )
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        answer = self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))


_CODES = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, " ": 32}


class _Pipe:
    """The browser's end of the protocol: calls and their answers, in turn; what it reports in between goes to listeners."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes, self._held, self._number = reads, writes, b"", 0
        self.listeners: dict[str, Callable[[str, dict[str, Any]], None]] = {}

    def post(self, method: str, params: Mapping[str, Any], session: str | None = None) -> int:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        data = json.dumps(message | ({} if session is None else {"sessionId": session})).encode() + b"\0"
        while data:
            data = data[os.write(self._writes, data) :]
        return self._number

    def call(self, method: str, params: Mapping[str, Any], session: str | None = None) -> Any:
        number = self.post(method, params, session)
        while True:
            message = self._read()
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            if (listener := self.listeners.get(message.get("sessionId", ""))) and "method" in message:
                listener(message["method"], message["params"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            more = os.read(self._reads, 1 << 20)
            assert more, "the browser has ended"
            self._held += more
        message, _, self._held = self._held.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@contextmanager
def browser(profile: Path) -> Iterator[Callable[[], Page]]:
    """A browser with a profile of its own; what it yields opens a tab."""
    commands, writes = os.pipe()
    reads, answers = os.pipe()
    line = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'  # where the browser expects them
    arguments = [str(CHROMIUM), *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        ["bash", "-c", line, "bash", str(commands), str(answers), *arguments],
        pass_fds=(commands, answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands)
    os.close(answers)
    pipe = _Pipe(reads, writes)

    def tab() -> Page:
        target = pipe.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        return Page(pipe, pipe.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"])

    try:
        yield tab
    finally:
        pipe.post("Browser.close", {})
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
        os.close(reads)
        os.close(writes)
