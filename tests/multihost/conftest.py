"""Two hosts for the whole folder, and pools that are attached to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit.controller.machines import attach
from labkit.controller.machines.launch_text import Launch
from tests.multihost.hosts import Host, can_make_hosts, make_bridge, remove_bridge

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    for item in items:
        if HERE in item.path.parents:
            reason = can_make_hosts() if reason is None else reason
            item.add_marker(pytest.mark.timeout(240))
            if reason and "hosts" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def bridge() -> Iterator[None]:
    make_bridge()
    yield
    remove_bridge()


@pytest.fixture(scope="module")
def hosts(bridge: None) -> Iterator[list[Host]]:
    made = [Host(number) for number in range(2)]
    yield made
    for host in made:
        host.remove()


@pytest.fixture(scope="module")
def called(hosts: list[Host]) -> Iterator[list[Launch]]:
    """Run the command that the notebook shows on every host; return the texts shown, the latest last."""
    shown: list[Launch] = []
    call = attach.ShownCommand.call

    def call_and_run(self: attach.ShownCommand, launch: Launch) -> None:
        call(self, launch)
        shown.append(launch)
        for host in hosts:
            host.agent(launch)

    patch = pytest.MonkeyPatch()
    patch.setattr(attach.ShownCommand, "call", call_and_run)
    yield shown
    patch.undo()
