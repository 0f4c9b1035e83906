"""The control thread, which answers the controller while the main thread is stuck in a cell."""

from __future__ import annotations

import threading
import traceback

import zmq

from labkit.wire.messages import Abort, Aborted, Inspect, Inspection, Interrupt, Release, ToControl
from labkit.wire.payload import Packed
from labkit.wire.transport import WorkerWire
from labkit.worker.groups.process_group import ProcessGroups
from labkit.worker.run import introspection
from labkit.worker.steps.run_state import RunState


class ControlThread:
    """Answers interrupts, aborts and inspections.

    Args:
        wire: The worker's wire.
        rank: This rank.
        state: The state of the main thread.
        groups: This rank's process groups.
    """

    def __init__(self, wire: WorkerWire, rank: int, state: RunState, groups: ProcessGroups) -> None:
        self._wire, self._rank, self._state, self._groups = wire, rank, state, groups
        self._held: dict[int, Packed] = {}
        self._thread = threading.Thread(target=self._serve, name="labkit-control", daemon=True)

    def start(self) -> None:
        """Connect to the controller and listen."""
        self._wire.announce("control", Aborted(self._rank, 0, "control thread is up"))
        self._thread.start()

    def hold(self, run_id: int, packed: Packed) -> None:
        """Keep a result's memory file until the controller has read it."""
        if packed.memory is not None:
            self._held[run_id] = packed

    def _serve(self) -> None:
        try:
            while True:
                message = self._wire.receive_control()
                try:
                    self._handle(message)
                except zmq.ZMQError:
                    raise
                except Exception:
                    # Every way out of a hang needs this thread, so it must survive its own errors.
                    traceback.print_exc()
        except zmq.ZMQError:
            self._wire.close_control()  # the worker is ending and waits for this in close()

    def _handle(self, message: ToControl) -> None:
        if isinstance(message, Interrupt):
            self._state.interrupt(message.run_id)
        elif isinstance(message, Abort):
            self._state.board.wait_for_others()
            self._wire.announce("control", Aborted(self._rank, message.run_id, self._groups.abort(message.run_id)))
        elif isinstance(message, Inspect):
            report = introspection.report(self._state, self._groups)
            self._wire.announce("control", Inspection(self._rank, message.request_id, report))
        elif isinstance(message, Release):
            packed = self._held.pop(message.run_id, None)
            if packed is not None:
                packed.close()
