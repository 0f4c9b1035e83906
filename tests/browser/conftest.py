"""JupyterLab on a free port of this machine, and Chromium to look at it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import nbformat
import psutil
import pytest
from jupyter_core.utils import run_sync
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from playwright.sync_api import Browser, sync_playwright

from labkit.base import machine
from labkit.course.learner.cli import PRIVATE
from tests.browser.lab_page import LabPage
from tests.notebooks.conventions import ROOT

SERVER_START_S = 90.0
SHOTS = ROOT / "build" / "browser"
_FLAGS = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
# No news and no check for updates: no request goes to another machine, and no message covers a screenshot.
_QUIET = [
    "--LabApp.news_url=",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",
]
_SETTINGS = {
    "apputils-extension/notification": {"checkForUpdates": False, "fetchNews": "false", "doNotDisturbMode": True},
    # All cells are in the page, also those that are not on the screen.
    "notebook-extension/tracker": {"windowingMode": "none"},
}
_KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}


@dataclass(frozen=True)
class LabServer:
    """A running JupyterLab.

    Attributes:
        address: Its address.
        token: Its token.
        root: The folder that it shows.
        process: Its process.
    """

    address: str
    token: str
    root: Path
    process: psutil.Process

    def add(self, name: str, *sources: str) -> str:
        """Write a notebook of code cells; those that begin with ``#`` and a blank in a first line of their own are text."""
        cells = [new_markdown_cell(text) if text.startswith("# ") else new_code_cell(text) for text in sources]
        nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": _KERNEL}), self.root / name)
        return name

    def descendants(self) -> list[psutil.Process]:
        """Every process below the server: kernels, fork servers, ranks."""
        return self.process.children(recursive=True)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    """JupyterLab with a home of its own: nothing in the user's is read or written."""
    home, root = tmp_path_factory.mktemp("lab-home"), tmp_path_factory.mktemp("lab-root")
    for name, value in _SETTINGS.items():
        path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))
    # Otherwise every opened page makes yarn look for something to build.
    (home / "config" / "labconfig").mkdir(parents=True)
    (home / "config" / "labconfig" / "page_config.json").write_text(json.dumps({"buildAvailable": False, "buildCheck": False}))
    port, token = _free_port(), secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--expose-app-in-browser", *_QUIET]
    command += [f"--ServerApp.root_dir={root}", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"]
    command += flags_of_make_lab()
    command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={token}"]
    command += ["--allow-root"] if os.geteuid() == 0 else []
    folders = {"CONFIG_DIR": "config", "DATA_DIR": "data", "RUNTIME_DIR": "run"}
    environment = os.environ | {f"JUPYTER_{key}": str(home / value) for key, value in folders.items()}
    environment |= {"JUPYTERLAB_SETTINGS_DIR": str(home / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces")}
    log = home / "server.log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=root, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_for(f"http://127.0.0.1:{port}/api/status?token={token}", process, log)
        yield LabServer(f"http://127.0.0.1:{port}", token, root, psutil.Process(process.pid))
    finally:
        _stop(process)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium without a window."""
    chromium = machine.find_chromium()
    assert chromium is not None  # else these tests are skipped
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        # Its event loop runs in this thread from now on. Beside a running loop jupyter_core starts a thread that it keeps: not in
        # the first test that starts a kernel, whose leak guard would see it.
        run_sync(asyncio.sleep)(0)
        running = playwright.chromium.launch(executable_path=chromium, args=[*_FLAGS, *root])
        yield running
        running.close()


@pytest.fixture
def open_notebook(server: LabServer, browser: Browser) -> Iterator[Callable[[str], LabPage]]:
    """Open a notebook of the server's folder in a tab. Requests to any other machine fail, and kernels end with the test."""
    with _tabs(server, browser) as open_one:
        yield open_one


@pytest.fixture(scope="module")
def open_for_module(server: LabServer, browser: Browser) -> Iterator[Callable[[str], LabPage]]:
    """Share one tab among all tests of a file."""
    with _tabs(server, browser) as open_one:
        yield open_one


@contextmanager
def _tabs(server: LabServer, browser: Browser) -> Iterator[Callable[[str], LabPage]]:
    context = browser.new_context(viewport={"width": 1280, "height": 960})
    own = (server.address, server.address.replace("http", "ws"), "data:", "blob:")
    context.route(lambda url: not url.startswith(own), lambda route: route.abort())
    pages: list[LabPage] = []
    before = _sessions(server)

    def open_one(name: str) -> LabPage:
        pages.append(LabPage(context, server.address, server.token, name))
        return pages[-1]

    yield open_one
    outside = [url for page in pages for url in page.requests if not url.startswith(own)]
    context.close()
    _end_kernels(server, before)
    assert not outside, f"the page asked other machines: {outside}"


def flags_of_make_lab() -> list[str]:
    """Return the options for privacy with which ``make lab`` starts JupyterLab."""
    return [PRIVATE]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + SERVER_START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(address, timeout=2).read()
        except OSError:
            time.sleep(0.1)
        else:
            return
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-4000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(5)


def _sessions(server: LabServer) -> set[str]:
    """The ids of the server's sessions: a notebook with a kernel each."""
    with urllib.request.urlopen(f"{server.address}/api/sessions?token={server.token}", timeout=10) as answer:
        return {session["id"] for session in json.load(answer)}


def _end_kernels(server: LabServer, kept: set[str]) -> None:
    """Shut kernels down through the server, as closing JupyterLab's list of kernels does."""
    for session in _sessions(server) - kept:
        address = f"{server.address}/api/sessions/{session}?token={server.token}"
        urllib.request.urlopen(urllib.request.Request(address, method="DELETE"), timeout=30).read()


@pytest.fixture(scope="session")
def shots() -> Path:
    """Where screenshots are kept: a build product."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    return SHOTS
