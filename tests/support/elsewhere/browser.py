"""Trains in a headless Chromium with the worker of examples/javascript, and draws its page.

A server on this machine gives the browser the folder of the example, the steps, and a page that starts one worker and
posts what it says. Nothing is fetched from elsewhere.
"""

from __future__ import annotations

import base64
import functools
import http.server
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from tests.support.elsewhere import FOLDER

SECONDS = 300.0
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
_PAGE = """<!doctype html><script type="module">
const job = Object.fromEntries(new URL(location.href).searchParams);
const worker = new Worker("worker.mjs", { type: "module" });
const post = (found) => fetch("report", { method: "POST", body: JSON.stringify(found) });
const losses = [], milliseconds = [];
let heap = 0;
worker.onerror = (event) => post({ error: event.message || "the worker could not be started" });
worker.onmessage = ({ data }) => {
  if (data.error) return post({ error: data.error });
  if (data.done) return post({ losses, heap, milliseconds });
  losses.push(data.loss);
  milliseconds.push(data.milliseconds);
  heap = data.heap;
};
worker.postMessage({ model: `steps/${job.model}`, state: `steps/${job.state}`, steps: Number(job.steps),
  limit: Number(job.limit ?? 0) });
</script>"""


_WIRED = """
import fcntl, os, sys
for given in (1, 2):
    sys.argv[given] = fcntl.fcntl(int(sys.argv[given]), fcntl.F_DUPFD, 10)
for number, given in ((3, 1), (4, 2)):
    os.dup2(sys.argv[given], number)
os.execv(sys.argv[3], sys.argv[3:])
"""  # the protocol has its pipes at descriptors 3 and 4


_PROFILE: Any = {"prefix": "onnx-remat-", "ignore_cleanup_errors": True}
"""Of the folder of a browser's profile: its last processes may still write there."""


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Files of two folders, the page above, and what it posts."""

    def __init__(self, *given: Any, steps: Path, reports: queue.SimpleQueue[Any], **more: Any) -> None:
        self.steps, self.reports = steps, reports
        super().__init__(*given, **more)

    def translate_path(self, path: str) -> str:
        parts = urllib.parse.unquote(urllib.parse.urlsplit(path).path).lstrip("/")
        if parts.startswith("steps/"):
            return str(self.steps / Path(parts).name)
        return super().translate_path(path)

    def do_GET(self) -> None:
        if urllib.parse.urlsplit(self.path).path != "/measure":
            return super().do_GET()
        page = _PAGE.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)
        return None

    def do_POST(self) -> None:
        self.reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing: standard error is the command's."""


@contextmanager
def served(steps: Path) -> Iterator[tuple[str, queue.SimpleQueue[Any]]]:
    """The address of the example's folder, with `steps` as ``steps/``; what pages post."""
    reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
    handler = functools.partial(_Handler, directory=str(FOLDER), steps=steps.resolve(), reports=reports)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", reports
        finally:
            server.shutdown()
            thread.join()


def train(chromium: str, steps: Path, model: str, state: str, count: int, limit: int = 0) -> dict[str, Any]:
    """Losses, heap (bytes) and milliseconds per step of a training in a fresh browser.

    Raises
    ------
    RuntimeError
        The step fails there, or says nothing for `SECONDS`.
    """
    query = urllib.parse.urlencode({"model": model, "state": state, "steps": count, "limit": limit})
    with served(steps) as (address, reports), tempfile.TemporaryDirectory(**_PROFILE) as profile:
        command = [chromium, *_FLAGS, f"--user-data-dir={profile}", f"{address}/measure?{query}"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            found = reports.get(timeout=SECONDS)
        except queue.Empty:
            raise RuntimeError(f"{Path(chromium).name} said nothing for {SECONDS:.0f} s") from None
        finally:
            process.terminate()
            process.wait()
    if "error" in found:
        raise RuntimeError(f"{model} in {Path(chromium).name}: {found['error']}")
    return dict(found)


class Tab:
    """A tab of a browser that is spoken to through two pipes, in Chromium's DevTools protocol."""

    def __init__(self, send: BinaryIO, receive: BinaryIO) -> None:
        self._send, self._receive, self._last, self._session = send, receive, 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": given}
        if self._session:
            message["sessionId"] = self._session
        self._send.write(json.dumps(message).encode() + b"\0")
        self._send.flush()
        while True:
            answer = json.loads(self._message())
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])

    def _message(self) -> bytes:
        parts = bytearray()
        while (byte := self._receive.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("the browser ended")
            parts += byte
        return bytes(parts)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']['text']}")
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true, `SECONDS` at most."""
        until = time.monotonic() + SECONDS
        while not self.ask(expression):
            if time.monotonic() > until:
                raise RuntimeError(f"not within {SECONDS:.0f} s: {expression}")
            time.sleep(0.1)

    def picture(self, path: Path, dark: bool) -> None:
        """Write what the tab shows to a PNG file."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        height = self.ask("document.documentElement.offsetHeight")
        self.call("Emulation.setDeviceMetricsOverride", width=800, height=height, deviceScaleFactor=1, mobile=False)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def tab(chromium: str) -> Iterator[Tab]:
    """A tab of a fresh headless browser."""
    to_browser, from_here = os.pipe()
    from_browser, to_here = os.pipe()
    with tempfile.TemporaryDirectory(**_PROFILE) as profile:
        flags = [*_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        wired = [sys.executable, "-c", _WIRED, str(to_browser), str(to_here), chromium, *flags]
        process = subprocess.Popen(
            wired, pass_fds=(to_browser, to_here), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(to_here)
        try:
            with os.fdopen(from_here, "wb") as send, os.fdopen(from_browser, "rb") as receive:
                yield Tab(send, receive)
        finally:
            process.terminate()
            process.wait()


def page(chromium: str, steps: Path, model: str, pictures: Mapping[str, Path], count: int = 20) -> dict[str, Any]:
    """Train both files of a model on the page as a user would; `pictures`: where to write what it shows, by scheme.

    Returns
    -------
    dict
        The status line (``status``), what stands next to the bars (``heaps``), and the curves' legend (``legend``).
    """
    with served(steps) as (address, _), tab(chromium) as shown:
        shown.call("Page.navigate", url=f"{address}/index.html")
        shown.wait("document.getElementById('model')?.options.length > 0")
        shown.ask(f"document.getElementById('model').value = {json.dumps(model)}")
        shown.ask("document.getElementById('model').dispatchEvent(new Event('change'))")
        shown.ask(f"document.getElementById('steps').value = {count}")
        for file in ("before", "after"):
            shown.ask(f"document.querySelector('input[value={file}]').click()")
            shown.ask("document.getElementById('train').click()")
            shown.wait("document.body.hasAttribute('data-done') || document.getElementById('status').className")
        for scheme, path in pictures.items():
            shown.picture(path, dark=scheme == "dark")
        texts = "[...document.querySelectorAll({})].map((element) => element.textContent)"
        return {
            "status": shown.ask("document.getElementById('status').textContent"),
            "heaps": shown.ask(texts.format("'.heap b'")),
            "legend": shown.ask(texts.format("'svg text.before, svg text.after'")),
        }
