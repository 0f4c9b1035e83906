"""The readers of a large ``.metadata``: separate processes, or one reader in this process.

Threads share Python's lock: two of them saved only a third of the time. The processes are spawned, because a process with threads
cannot be forked safely; they need only numpy. This module needs neither numpy nor torch: ``labkit checkpoint show`` starts the
readers and imports torch while they read.
"""

from __future__ import annotations

import os
import pickle
import selectors
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.checkpoint.files.plain_files import open_regular
from labkit.errors import CheckpointError
from labkit.machine import usable_cores

if TYPE_CHECKING:
    from labkit.checkpoint.formats.large_index.share import Tables

PARALLEL_BYTES = 1 << 28  # starting a process costs 0.3 s of processor time, reading this much 1 s
MOST_PROCESSES = 4  # with four, reading 1.6 GB takes about as long as importing torch; more were not measured
BLOCK_BYTES = 1 << 22
_MOST_REST = 1 << 26  # the rest is unpickled at about 10 MB/s
_METADATA_FILE = ".metadata"
# Not -m: that would search modules in the working directory first, which may be a checkpoint from elsewhere.
_START = "import sys; sys.path[:] = sys.argv[8:]; from labkit.checkpoint.formats.large_index.child import main; main(sys.argv[1:8])"
_ahead: dict[tuple[int, ...], Processes] = {}


class ReadersLostError(Exception):
    """A reading process has ended, or could not be started."""


def most_rest(size: int) -> int:
    """Return the most bytes of a file of this size that may be outside records."""
    return min(size // 2, _MOST_REST)


class Here:
    """One reader in this process.

    Args:
        file: The file's descriptor.
    """

    def __init__(self, file: int) -> None:
        from labkit.checkpoint.formats.large_index.block_source import FIRST_TURN, Blocks
        from labkit.checkpoint.formats.large_index.share import Share

        self._turn = os.pipe()
        os.write(self._turn[1], FIRST_TURN)
        self._share = Share(Blocks(file, self._turn, most_rest(os.fstat(file).st_size), BLOCK_BYTES))

    def tables(self, shape: tuple[int, int]) -> Tables:
        """Create the columns that it fills."""
        from labkit.checkpoint.formats.large_index.share import Tables

        self._share.tables = Tables(shape)
        return self._share.tables

    def read(self) -> list[Any]:
        """Return its findings in the blocks."""
        return [self._share.read()]

    def each(self, step: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Do a further step."""
        return [getattr(self._share, step)(*own) for own in arguments]

    def close(self) -> None:
        """Close the pipe."""
        for end in self._turn:
            os.close(end)


class Processes:
    """Several readers, each in a process of its own. They begin to read at once.

    They end when they are closed, and when this process ends for any reason, because their input then closes.

    Args:
        file: The file's descriptor. The processes inherit it, so all read the same file even if another one takes its name.
        count: The number of processes.

    Raises:
        OSError: A process could not be started.
    """

    def __init__(self, file: int, count: int) -> None:
        self._children: list[subprocess.Popen[bytes]] = []
        self._tables_file = -1
        turn = os.pipe()
        try:
            self._tables_file = os.memfd_create("labkit-metadata")  # memory without a name, so nothing is left behind
            numbers = (file, self._tables_file, *turn, most_rest(os.fstat(file).st_size), BLOCK_BYTES)
            for index in range(count):
                self._children.append(_start((*numbers, index), (file, self._tables_file, *turn)))
            self._ask("read", [()] * count)
        except BaseException:
            self.close()
            raise
        finally:
            for end in turn:
                os.close(end)

    def tables(self, shape: tuple[int, int]) -> Tables:
        """Create the columns that they fill, in shared memory."""
        from labkit.checkpoint.formats.large_index.share import Tables

        os.ftruncate(self._tables_file, max(Tables.size(shape), 1))
        return Tables(shape, self._tables_file)

    def read(self) -> list[Any]:
        """Return each process's findings in its blocks."""
        return self._replies()

    def each(self, step: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Let each process do a further step, all at the same time."""
        self._ask(step, arguments)
        return self._replies()

    def close(self) -> None:
        """Kill the processes, whatever they are doing."""
        for child in self._children:
            child.kill()
        for child in self._children:
            for pipe in (child.stdin, child.stdout):
                with suppress(OSError):
                    assert pipe is not None
                    pipe.close()
            child.wait()
        self._children.clear()
        if self._tables_file >= 0:
            os.close(self._tables_file)
            self._tables_file = -1

    def _ask(self, step: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        for child, own in zip(self._children, arguments, strict=True):
            assert child.stdin is not None
            try:
                pickle.dump((step, own), child.stdin, pickle.HIGHEST_PROTOCOL)
                child.stdin.flush()
            except BrokenPipeError:
                raise ReadersLostError from None

    def _replies(self) -> list[Any]:
        """Return all replies, which arrive in any order. Raise if a process has ended, since others would wait for their turn."""
        replies: dict[int, Any] = {}
        with selectors.DefaultSelector() as waiting:
            for number, child in enumerate(self._children):
                assert child.stdout is not None
                waiting.register(child.stdout, selectors.EVENT_READ, number)
            while waiting.get_map():
                ready = waiting.select(timeout=1)
                # EOF does not suffice: a process forked by another thread may hold the child's end of the pipe open too.
                if not ready and any(child.poll() is not None for child in self._children):
                    raise ReadersLostError
                for key, _ in ready:
                    replies[key.data] = _reply(key.fileobj)
                    waiting.unregister(key.fileobj)
        return [replies[number] for number in range(len(self._children))]


def _reply(pipe: Any) -> Any:
    """Return a reader's reply. Only labkit's own code made it, and it holds the file's bytes as bytes."""
    from labkit.checkpoint.formats.large_index.parts import OtherFormError

    try:
        reply = pickle.load(pipe)
    except Exception:  # a process that ends in the middle of a reply can cause any error here
        raise ReadersLostError from None
    if reply is None:
        raise OtherFormError
    return reply[0]


def _start(numbers: tuple[int, ...], descriptors: tuple[int, ...]) -> subprocess.Popen[bytes]:
    home = str(Path(__file__).parents[4])
    # A relative entry may be another folder by now than when this process imported numpy from it.
    folders = [folder for folder in sys.path if Path(folder).is_absolute()]
    command = [sys.executable, "-P", "-c", _START, *map(str, numbers), *folders, *([] if home in folders else [home])]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=descriptors,
        cwd="/",  # an empty entry of PYTHONPATH means the working directory
        start_new_session=True,  # Ctrl-C interrupts only this process, which then ends the children
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )


def _identity(file: int) -> tuple[int, ...]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def readers_of(file: int) -> Iterator[Here | Processes]:
    """Return the readers of a file: those that already read it, or new ones.

    Args:
        file: The file's descriptor.

    Ranks: local.
    """
    readers = _ahead.pop(_identity(file), None) or _processes(file) or Here(file)
    try:
        yield readers
    finally:
        readers.close()


@contextmanager
def reading_ahead(path: Path) -> Iterator[None]:
    """Read a DCP directory's large ``.metadata`` in the background while the block runs; `readers_of` then returns these readers.

    Ranks: local.
    """
    key: tuple[int, ...] = ()
    started = None
    try:
        with open_regular(path if path.name == _METADATA_FILE else path / _METADATA_FILE) as file:
            key, started = _identity(file.fileno()), _processes(file.fileno())
    except (OSError, CheckpointError):
        pass  # the caller that opens it reports what is wrong
    if started is None:
        yield
        return
    _ahead[key] = started
    try:
        yield
    finally:
        _ahead.pop(key, None)
        started.close()


def _processes(file: int) -> Processes | None:
    """Start processes if they save time; return None if they do not, or cannot be started."""
    cores = usable_cores()
    # Without memfd_create of Linux, the columns would need a file on a disk that may be full.
    if cores < 2 or os.fstat(file).st_size < PARALLEL_BYTES or not hasattr(os, "memfd_create"):
        return None
    try:
        return Processes(file, min(cores, MOST_PROCESSES))
    except (OSError, ReadersLostError):
        return None
