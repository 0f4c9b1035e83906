"""Several hosts on one machine: network namespaces on a bridge, each with an address of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from labkit.controller.machines.launch_text import Launch
from tests.process.patience import until

# The notebook's own host is the machine that runs the tests; its address on the bridge is .1, and host 0 is .10. Tests that run at
# the same time have networks of their own.
NETWORK = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"


def ip(*words: str) -> None:
    """Run ``ip``; it complains on stderr and fails the test."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def can_make_hosts() -> str:
    """Return the reason why no network namespace can be made here; empty if one can.

    Raises:
        CalledProcessError: It fails for a reason other than rights that this machine lacks, so no test may be skipped for it.
    """
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    # pytest-xdist's processes ask at the same time: each has names of its own.
    namespace, bridge = f"labkit-probe-{os.getpid()}", f"lkp{os.getpid()}"
    try:
        ip("netns", "add", namespace)
        ip("netns", "delete", namespace)
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "delete", bridge)
    except FileNotFoundError:
        return "the command ip (iproute2) is not installed"
    except subprocess.CalledProcessError as error:
        if not any(text in error.stderr for text in ("not permitted", "Permission denied", "not supported", "Unknown device type")):
            raise
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    return ""


class Host:
    """One host.

    Args:
        number: From 0.

    Attributes:
        address: Its address.
        output: What its commands write.
    """

    def __init__(self, number: int) -> None:
        self.number, self.address = number, f"{NETWORK}.{10 + number}"
        self.namespace = f"labkit-{os.getpid()}-{number}"
        self._outer = f"lk{os.getpid() % 100000}-{number}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self.output = Path(tempfile.mkstemp(prefix="labkit-host-")[1])
        inner = f"{self._outer}i"
        ip("netns", "add", self.namespace)
        ip("link", "add", self._outer, "type", "veth", "peer", "name", inner)
        ip("link", "set", inner, "netns", self.namespace)
        ip("link", "set", self._outer, "master", bridge_name())
        ip("link", "set", self._outer, "up")
        ip("-n", self.namespace, "link", "set", inner, "name", "eth0")
        ip("-n", self.namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        ip("-n", self.namespace, "link", "set", "eth0", "up")
        ip("-n", self.namespace, "link", "set", "lo", "up")

    def run(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a command on this host; it is ended with the host."""
        with open(self.output, "ab") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd(), "LABKIT_HOST": str(self.number)},
            )
        self._processes.append(process)
        return process

    def agent(self, launch: Launch, *options: str) -> subprocess.Popen[bytes]:
        """Start an agent as the notebook shows it, with further options."""
        return self.run(sys.executable, *launch.arguments(), *options)

    @property
    def received_bytes(self) -> int:
        """The bytes received over its cable so far."""
        return int(Path(f"/sys/class/net/{self._outer}/statistics/tx_bytes").read_text())

    def cut_off(self) -> None:
        """Unplug its cable."""
        ip("link", "set", self._outer, "down")

    def connect(self) -> None:
        """Plug the cable in again."""
        ip("link", "set", self._outer, "up")

    @property
    def pids(self) -> set[int]:
        """Every process on this host."""
        listing = subprocess.run(["ip", "netns", "pids", self.namespace], check=True, capture_output=True, text=True)
        return {int(word) for word in listing.stdout.split()}

    def remove(self) -> None:
        """End what still runs there, and remove the host."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        for process in self._processes:
            process.wait(10)
        until(lambda: not self.pids, "the host's processes have ended")
        ip("netns", "delete", self.namespace)
        with contextlib.suppress(subprocess.CalledProcessError):  # the other end took it along
            ip("link", "delete", self._outer)
        self.output.unlink()


def bridge_name() -> str:
    """The bridge of this test process."""
    return f"lkbr{os.getpid() % 1000000}"


def make_bridge() -> None:
    """Connect the hosts, and this machine with them."""
    ip("link", "add", bridge_name(), "type", "bridge")
    ip("address", "add", f"{NETWORK}.1/24", "dev", bridge_name())
    ip("link", "set", bridge_name(), "up")


def remove_bridge() -> None:
    """Remove the bridge."""
    ip("link", "delete", bridge_name())
