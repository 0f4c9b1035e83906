"""The life of a worker: start, process one message at a time, end."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from labkit.base import tracebacks
from labkit.errors import FailureKind, RankFailure, StrangerError, WireError
from labkit.wire.messages import Begun, Bye, Display, Execute, Failed, Ready, Result, Shutdown
from labkit.wire.payload import Packed, pack, unpack
from labkit.wire.pipes import Kept
from labkit.wire.spec import WorkerSpec
from labkit.wire.transport import WorkerWire
from labkit.worker.groups import backends
from labkit.worker.groups.process_group import ProcessGroups
from labkit.worker.mend.recovery import Recovery
from labkit.worker.run import guard
from labkit.worker.run import shell as rank_shell
from labkit.worker.run.capture import Capture
from labkit.worker.run.control import ControlThread
from labkit.worker.run.namespace import LentNames, lend_namespace
from labkit.worker.steps.run_state import RunState
from labkit.worker.steps.step_board import StepBoard

# At the start a rank may end because another one has left. Wait for that one's error first: it is the cause, and is named.
VICTIM_WAITS_S = 1.0

# Kinds of work that run no code of the reader's.
_OWN_KINDS = ("rebuild", "ask")
# torch's error for a script that is pasted into a cell.
_TWICE = "trying to initialize the default process group twice"


class Worker:
    """One rank.

    Args:
        spec: Its place in the pool.
        read_fds: Read ends of the pipes behind its fd 1 and 2.
        kept: Memory for the last output read from them, for the report of a death.
    """

    def __init__(self, spec: WorkerSpec, read_fds: tuple[int, int], kept: Kept) -> None:
        import torch

        torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
        self._spec = spec
        self._pid = os.getpid()
        self._wire = WorkerWire(spec.rank, spec.endpoint)
        # Ranks on several machines do not share memory.
        board = os.path.join(spec.directory, "steps") if spec.local_world_size == spec.world_size else None
        self._state = RunState(StepBoard(board, spec.rank, spec.world_size))
        self._groups = ProcessGroups(spec)
        self._control = ControlThread(self._wire, spec.rank, self._state, self._groups)
        self._control.start()
        if spec.joining:
            self._groups.join()
        else:
            self._groups.form()
        self._capture = Capture(self._wire, spec.rank, read_fds, kept)
        self._shell = rank_shell.RankShell.create(self._emit, self._first_names())
        self._lent = LentNames(self._shell.user_ns)
        self._recovery = Recovery(spec.rank, self._state, self._groups, self._shell.user_ns)
        self._wire.announce("main", Ready(spec.rank, os.getpid(), os.uname().nodename, str(self._groups.device)))

    def _first_names(self) -> dict[str, Any]:
        spec = self._spec
        return {
            "rank": spec.rank,
            "world_size": spec.world_size,
            "local_rank": spec.local_rank,
            "device": self._groups.device,
        }

    def _emit(self, item: Display) -> None:
        self._capture.emit(item)

    def serve(self) -> None:
        """Process one message at a time until Shutdown."""
        while True:
            message, frames = self._wire.receive_main()
            if isinstance(message, Shutdown):
                break
            self._handle(message, frames)
        self._capture.close()
        self._wire.send_event(Bye(self._spec.rank))
        self._wire.close()

    def _handle(self, message: Execute, frames: list[bytes]) -> None:
        self._capture.run_id = message.run_id
        self._state.begin(message.run_id)
        packed: Packed | None = None
        failure: RankFailure | None = None
        cut_off = False
        try:
            value = self._serve_pool(message) if message.kind in _OWN_KINDS else self._run_user_code(message, frames)
            if value is not _NOTHING:
                packed = pack(value, share_memory=True)
        except BaseException as error:
            failure = self._failure(error)
            cut_off = backends.is_cut_off(error)
            if message.kind not in _OWN_KINDS:
                self._recovery.end(error, cut=cut_off or self._state.interrupt_requested)
            tracebacks.release_frames(error)
        begun: Begun | None = None
        if message.kind not in _OWN_KINDS and failure is None:
            begun = self._recovery.begun()
            self._recovery.end(None, cut=self._state.interrupt_requested)
        self._state.end()
        self._capture.flush()
        if failure is not None:
            lost = self._groups.lost or cut_off
            self._wire.send_event(Failed(self._spec.rank, message.run_id, failure, group_lost=lost, cut_off=cut_off))
        else:
            self._answer(message.run_id, packed, begun)

    def _serve_pool(self, message: Execute) -> Any:
        if message.kind == "ask":
            return self._groups.obstacle
        assert message.group is not None
        return self._recovery.mend(message.group, message.run_id)

    def _run_user_code(self, message: Execute, frames: list[bytes]) -> Any:
        self._recovery.begin(message.run_id)
        try:
            self._state.enter_user_code()
            with guard.guarded(message.ranks, self._spec.world_size):
                value = self._execute(message, frames)
                self._groups.finish_device_work()
        except BaseException as error:
            self._leave_if_forked(error)
            raise
        else:
            self._leave_if_forked(None)
        finally:
            self._state.leave_user_code()
        return value

    def _leave_if_forked(self, error: BaseException | None) -> None:
        """End a process that the cell has forked, as it would end with a script. It is not a rank."""
        if os.getpid() == self._pid:
            return
        code = 0 if error is None else 1
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif error is not None:
            sys.stderr.write(tracebacks.format_error(error, self._shell.number_of) + "\n")
        self._capture.flush_streams()
        os._exit(code)

    def _answer(self, run_id: int, packed: Packed | None, begun: Begun | None) -> None:
        if packed is not None:
            self._control.hold(run_id, packed)
        payload = packed.payload if packed is not None else None
        self._wire.send_event(Result(self._spec.rank, run_id, payload, begun), packed.frames if packed is not None else ())

    def _execute(self, message: Execute, frames: list[bytes]) -> Any:
        if message.kind == "cell":
            return self._run_cell(message)
        if message.kind == "call":
            return self._call(message, frames)
        if message.kind == "push":
            self._shell.user_ns.update(self._unpack(message, frames))
            return _NOTHING
        return eval(compile(message.source, "<pull>", "eval"), self._shell.user_ns)

    def _run_cell(self, message: Execute) -> Any:
        value, shown = self._shell.run_source(message.source, message.cell_number)
        if message.want_value:
            return value
        if shown is not None:
            self._emit(shown)
        return _NOTHING

    def _unpack(self, message: Execute, frames: list[bytes]) -> Any:
        assert message.payload is not None
        value, companions, sources = unpack(message.payload, frames)
        rank_shell.register_sources(self._shell, sources)
        self._lent.lend(companions)
        return value

    def _call(self, message: Execute, frames: list[bytes]) -> Any:
        self._shell.prepare_call()  # before the function is looked up, in a module that may have changed
        function, args, kwargs = self._unpack(message, frames)
        lend_namespace(function, self._shell.user_ns)
        try:
            return function(*args, **kwargs)
        finally:
            self._shell.events.trigger("post_execute")  # shows the figures that the function drew

    def _failure(self, error: BaseException) -> RankFailure:
        interrupted = isinstance(error, KeyboardInterrupt) or self._state.interrupt_requested
        kind: FailureKind = "interrupted" if interrupted else "exited" if isinstance(error, SystemExit) else "exception"
        message = _text(error)
        if _TWICE in message:
            error.add_note("Every rank of a pool has its default process group: leave out init_process_group here.")
        if kind == "exited":
            message = f"the cell asked the rank to exit ({message or 0}); the rank lives on"
        # The diagnosis reports where a rank was interrupted, so a traceback is not needed, and the interrupter waits.
        quiet = kind == "interrupted" or isinstance(error, WireError)
        trace = "" if quiet else tracebacks.format_error(error, self._shell.number_of, own_lines_only=kind == "exited")
        where = tracebacks.own_place(error, self._shell.number_of)
        in_handler = kind == "interrupted" and _is_of_a_handler(error)
        return RankFailure(self._spec.rank, kind, rank_shell.type_name(error), message, trace, where=where, in_handler=in_handler)


def _is_of_a_handler(error: BaseException) -> bool:
    """Return whether an error, perhaps a second interrupt after time ran out, was raised while KeyboardInterrupt was handled."""
    seen: set[int] = set()
    found = error.__context__
    while found is not None and id(found) not in seen:
        if isinstance(found, KeyboardInterrupt):
            return True
        seen.add(id(found))
        found = found.__context__
    return False


def _text(error: BaseException) -> str:
    """Return the error's message. An error of the reader's own class may fail to produce it."""
    try:
        return str(error)
    except Exception as second:
        return f"(its message cannot be read: str() raised {type(second).__name__})"


class _Nothing:
    """The mark of a run that returns no value, because None is a value."""


_NOTHING = _Nothing()


def main(spec: WorkerSpec, read_fds: tuple[int, int], kept: Kept) -> None:
    """Run a worker in this process until it is told to end."""
    try:
        worker = Worker(spec, read_fds, kept)
    except StrangerError as error:
        # The notebook shows what a rank wrote last. The message says all.
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(1)
    except RuntimeError as error:
        if backends.is_cut_off(error):
            time.sleep(VICTIM_WAITS_S)
        raise
    worker.serve()
