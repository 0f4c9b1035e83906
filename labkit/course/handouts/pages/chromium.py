"""Chromium as a printer: it gets a page as text and runs, fetches and opens nothing that the page asks for.

The page is written into an empty document, which may not open files. Scripts are disabled, and the only way to a network is a proxy
that does not exist. Commands go through a pipe (``--remote-debugging-pipe``), so no port is open. It starts in a folder of its own:
the Vulkan loader and SwiftShader look for libraries and settings below the working directory, where others may write.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import subprocess
import sys
import time
from typing import Any

from labkit.base import places
from labkit.course.handouts.errors import HandoutError

PDF_TIMEOUT_S = 120
_FLAGS = (
    "--headless",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--remote-debugging-pipe",
    "--proxy-server=none.invalid:9",
    "--proxy-bypass-list=<-loopback>",
    # No name resolves, not even the proxy's: a program listening there would get Chromium's own requests.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
# Chromium reads commands from descriptor 3 and answers on 4.
_START = (
    "import fcntl, os, sys\n"
    "r, w = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])\n"
    "os.dup2(r, 3)\nos.dup2(w, 4)\nos.execv(sys.argv[3], sys.argv[3:])"
)
# In the folder, Chromium makes a folder and a socket, whose names have some 55 characters.
_LONGEST = 50
_PRINT = {"printBackground": True, "preferCSSPageSize": True, "displayHeaderFooter": False, "generateDocumentOutline": True}


class _Browser:
    """A running Chromium, and the pipes to it."""

    def __init__(self, chromium: str, folder: str, deadline: float) -> None:
        command, self._commands = os.pipe()
        self._answers, answer = os.pipe()
        arguments = [os.path.abspath(chromium), *_FLAGS, "--generate-pdf-document-outline", f"--user-data-dir={folder}/profile"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            arguments.append("--no-sandbox")  # Chromium's sandbox refuses to run as root
        self._errors = open(f"{folder}/errors.txt", "w+")  # noqa: SIM115  # closed with the browser
        start = [sys.executable, "-I", "-S", "-c", _START, str(command), str(answer), *arguments, "about:blank"]
        nothing = subprocess.DEVNULL
        self._process = subprocess.Popen(
            start,
            stdin=nothing,
            stdout=nothing,
            stderr=self._errors,
            pass_fds=(command, answer),
            start_new_session=True,
            cwd=folder,
            env={**os.environ, "TMPDIR": folder},  # what it leaves there goes with the folder
        )
        os.close(command)
        os.close(answer)
        self._deadline, self._number, self._read = deadline, 0, b""

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        data = memoryview(json.dumps(message).encode() + b"\0")
        while data:
            data = data[os.write(self._commands, data) :]
        while True:
            answer = json.loads(self._next())
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise HandoutError(f"Chromium refused {method}: {answer['error'].get('message')}")
                return dict(answer["result"])

    def _next(self) -> bytes:
        while b"\0" not in self._read:
            if not select.select([self._answers], [], [], max(0.0, self._deadline - time.monotonic()))[0]:
                raise TimeoutError
            piece = os.read(self._answers, 1 << 20)
            if not piece:
                raise BrokenPipeError
            self._read += piece
        message, _, self._read = self._read.partition(b"\0")
        return message

    def errors(self) -> str:
        """Return the end of its own error output."""
        self._errors.seek(0)
        return self._errors.read()[-2000:]

    def close(self) -> None:
        """Kill Chromium and all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        for fd in (self._commands, self._answers):
            os.close(fd)
        self._errors.close()


def print_pdf(page: str, chromium: str, name: str) -> bytes:
    """Print a page as a PDF and return it.

    Raises:
        HandoutError: Chromium fails or takes longer than PDF_TIMEOUT_S; the message contains ``name``.
    """
    with places.temporary("labkit-print-", longest=_LONGEST) as folder:
        browser = _Browser(chromium, folder, time.monotonic() + PDF_TIMEOUT_S)
        try:
            target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
            session = browser.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            browser.ask("Emulation.setScriptExecutionDisabled", session, value=True)
            frame = browser.ask("Page.getFrameTree", session)["frameTree"]["frame"]["id"]
            browser.ask("Page.setDocumentContent", session, frameId=frame, html=page)
            return base64.b64decode(browser.ask("Page.printToPDF", session, **_PRINT)["data"])
        except TimeoutError:
            raise HandoutError(f"Chromium did not print {name} in {PDF_TIMEOUT_S} s.") from None
        except BrokenPipeError:
            raise HandoutError(f"Chromium ended before it had printed {name}:\n{browser.errors()}") from None
        finally:
            browser.close()
