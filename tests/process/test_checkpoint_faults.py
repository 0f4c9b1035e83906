"""SIGKILL at random instants, a full disk, damaged and missing files: never a wrong tensor, never a lost step."""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from labkit import checkpoint
from labkit.checkpoint import Reader, migrate, open_checkpoint, reshard, verify
from labkit.checkpoint.data.read import same_bits
from labkit.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from labkit.checkpoint.index import manifest
from tests.matrix import matrix
from tests.process.checkpoint_ranks import Launcher, launcher_fixture  # noqa: F401

KILLS = [pytest.param(3, id="few"), pytest.param(200, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
NUMEL = 200_000


def save_forever(rank: int, folder: str, first: int) -> None:
    """Save step after step; every value in a step is the step's number."""
    from tests.process.checkpoint_models import Net, fsdp2

    model = fsdp2(Net())
    for step in range(first, first + 10_000):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(step))
        state = {"model": model, "big": torch.full((NUMEL,), float(step)), "step": step, "mine": checkpoint.PerRank(step)}
        if step % 2:
            checkpoint.save(folder, state, step, keep=2, threads=2)
        else:
            checkpoint.save_async(folder, state, step, keep=2).wait()


def assert_whole(store: Path, step: int) -> None:
    """Require that a step holds its own values, and none of another step."""
    with Reader(open_checkpoint(manifest.step_directory(store, step)), checksums=True) as reader:
        for key in reader.checkpoint.tensors:
            tensor = reader.tensor(key)
            assert key.endswith("scale") or (tensor == step).all(), f"{key} of step {step} holds another step's values"
        assert reader.value("step") == reader.value("mine.rank_0") == reader.value("mine.rank_1") == step


@pytest.mark.parametrize("kills", KILLS)
def test_ranks_killed_while_saving_never_lose_a_published_step(launcher: Launcher, tmp_path: Path, kills: int) -> None:
    store, draw, newest = tmp_path / "store", random.Random(kills), 0
    for _ in range(kills):
        ranks = launcher.start(save_forever, 2, tmp_path, str(store), newest + 1)
        deadline = time.monotonic() + 30
        wait_for = newest + draw.randint(0, 2)
        while (manifest.complete_steps(store) or [0])[-1] < wait_for and ranks.alive() and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(draw.random() * 0.15)  # the random instant, not a wait for anything
        published = manifest.complete_steps(store)
        ranks.kill()
        left = manifest.complete_steps(store)
        # Retention may have removed older steps meanwhile; the newest one that was visible has to exist.
        assert not published or left[-1] >= published[-1]
        if left:
            newest = left[-1]
            assert verify(store).ok
            assert_whole(store, newest)
            assert_whole(store, left[0])
    assert newest > 0


def source(folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {f"layer{index}.weight": torch.randn(300, 400) for index in range(12)}
    dcp.save({"model": tensors, "epoch": 3}, checkpoint_id=folder, no_dist=True)
    return tensors


def migrate_once(rank: int, source_path: str, destination: str) -> int:
    return migrate(source_path, destination, shard_bytes=500_000).num_files


def reshard_once(rank: int, source_path: str, destination: str) -> int:
    return reshard(source_path, destination, 8).num_files


def changed_at(folder: Path) -> int:
    """Return the time when a folder's entries changed last; 0 if it does not exist."""
    try:
        return folder.stat().st_ctime_ns
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize("work", [migrate_once, reshard_once])
def test_a_killed_migration_leaves_nothing_or_everything_and_a_rerun_finishes(
    launcher: Launcher, tmp_path: Path, kills: int, work: Callable[..., int]
) -> None:
    tensors = source(tmp_path / "source")
    digests = {path.name: manifest.hash_file(path) for path in (tmp_path / "source").iterdir()}
    draw, destination, partial = random.Random(kills), tmp_path / "destination", tmp_path / "destination.partial"
    caught = 0
    for _ in range(kills):
        before, deadline = changed_at(partial), time.monotonic() + 60
        run = launcher.start(work, 1, tmp_path, str(tmp_path / "source"), str(destination))
        while changed_at(partial) == before and run.alive() and time.monotonic() < deadline:
            time.sleep(0.0005)
        pause, began = draw.random() * 0.15, time.monotonic()
        while run.alive() and time.monotonic() - began < pause:
            time.sleep(0.001)
        run.kill()
        caught += partial.exists()
        if destination.exists():
            assert verify(destination, against=tmp_path / "source").findings == []
            shutil.rmtree(destination)
    assert caught or kills < 10  # a few may all come too late
    if not destination.exists():
        launcher.run(work, 1, tmp_path, str(tmp_path / "source"), str(destination))
    with Reader(open_checkpoint(destination)) as reader:
        assert all(same_bits(reader.tensor(f"model.{name}"), tensor) for name, tensor in tensors.items())
    assert {path.name: manifest.hash_file(path) for path in (tmp_path / "source").iterdir()} == digests


KILLED = """
import itertools, os, shutil, signal, sys
import labkit.checkpoint.write.dcp_directory  # else each child imports DCP
from labkit.checkpoint import migrate, verify

name = sys.argv[1]

def run_with_a_kill_at(count):
    calls = itertools.count(1)
    def patch(function):
        real = getattr(os, function)
        def call(*arguments, **options):
            if next(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)
        setattr(os, function, call)
    for function in ("mkdir", "open", "write", "fsync", "rename", "link", "unlink", "rmdir"):
        patch(function)
    migrate("source/x.pt", name, shard_bytes=1000, workers=1)

def run_again():
    if os.path.exists(name):
        left = {name, "source"} | {name + ".partial"} & set(os.listdir())
    else:
        migrate("source/x.pt", name)
        left = {name, "source"}
    assert verify(name, against="source/x.pt").findings == []
    assert set(os.listdir()) == left, os.listdir()

def ended(work):
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

for count in itertools.count(1):
    end = ended(lambda: run_with_a_kill_at(count))
    assert ended(run_again) == 0, f"after a kill at system call {count}"
    os.unlink(name) if os.path.isfile(name) else shutil.rmtree(name)
    if end == 0:
        break
    assert end == -signal.SIGKILL
print(count)
"""


@pytest.mark.parametrize("name", matrix("out", "out.pt"))
def test_a_kill_at_any_system_call_leaves_nothing_or_everything_and_a_rerun_finishes(tmp_path: Path, name: str) -> None:
    (tmp_path / "source").mkdir()
    torch.save({f"t{index}": torch.full((100,), float(index)) for index in range(6)}, tmp_path / "source/x.pt")
    call = [sys.executable, "-c", KILLED, name]
    ran = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 20


# The command, with a pause after each file: otherwise it may end before the signal comes. If the tests run in the background of a
# script, they inherit that SIGINT is ignored, and Python does not change that.
SLOWLY = """
import signal, time
from labkit.checkpoint.convert import engine
from labkit.cli import main

def read_back(*args, real=engine.read_back):
    real(*args)
    time.sleep(0.2)

engine.read_back = read_back
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


@pytest.mark.parametrize("number", matrix(signal.SIGINT, signal.SIGTERM))
def test_an_interrupted_command_leaves_nothing_and_says_so(tmp_path: Path, number: signal.Signals) -> None:
    torch.save({f"t{index}": torch.full((1000,), float(index)) for index in range(60)}, tmp_path / "x.pt")
    call = [sys.executable, "-c", SLOWLY, "checkpoint", "migrate", "x.pt", "out", "--shard-bytes", "4000"]
    data, deadline = tmp_path / "out.partial/data", time.monotonic() + 60
    with subprocess.Popen(call, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        while not (data.exists() and os.listdir(data)) and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        run.send_signal(number)
        _, told = run.communicate(timeout=30)
    assert run.returncode == 130
    assert told == "Interrupted. out was not made, and nothing is left of it.\n"
    assert os.listdir(tmp_path) == ["x.pt"]


MOUNT = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs"]


@functools.cache
def can_mount() -> bool:
    """Return whether this machine lets the tests mount a tmpfs. Failures after that are errors."""
    with tempfile.TemporaryDirectory() as folder:
        if os.geteuid() != 0 or subprocess.run([*MOUNT, folder], check=False).returncode != 0:
            return False
        subprocess.run(["umount", folder], check=True)
    return True


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    if not can_mount():
        pytest.skip("needs the right to mount a tmpfs")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run([*MOUNT, str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_named_and_the_last_step_stays(small_disk: Path, tmp_path: Path) -> None:
    small, large = {"a": torch.ones(1000)}, {"a": torch.ones(2_000_000)}
    checkpoint.save(small_disk / "store", small, 1)
    for save in (checkpoint.save, lambda *args: checkpoint.save_async(*args).wait(30)):
        with pytest.raises(CheckpointError, match="No space left"):
            save(small_disk / "store", large, 2)
    assert checkpoint.load(small_disk / "store", {"a": torch.zeros(1000)}).step == 1
    torch.save(large, tmp_path / "large.pt")
    for run in (
        lambda: migrate(tmp_path / "large.pt", small_disk / "out"),
        lambda: reshard(tmp_path / "large.pt", small_disk / "out", 2),
    ):
        with pytest.raises(CheckpointError, match=r"out: No space left.*out was not made, and nothing is left of it"):
            run()
        assert sorted(path.name for path in small_disk.iterdir()) == ["store"]


def failure(work: Callable[[], Any]) -> CheckpointError | None:
    """Return the checkpoint error that a call raises, or None."""
    try:
        work()
    except CheckpointError as error:
        return error
    return None


@pytest.mark.parametrize("seed", range(3))
def test_damage_anywhere_gives_the_right_tensors_or_an_error_that_names_the_file(tmp_path: Path, seed: int) -> None:
    tensors = {f"t{index}": torch.randn(30, 10) for index in range(4)}
    store = tmp_path / "store"
    directory = checkpoint.save(store, {**tensors, "n": 3}, 1, threads=2)
    good = {path.name: path.read_bytes() for path in directory.iterdir()}
    draw = random.Random(seed)
    outcomes = {"right": 0, "named": 0}
    for _ in range(40):
        name = draw.choice(sorted(good))
        data = bytearray(good[name])
        kind = draw.choice(["flip", "cut", "remove", "zero", "swap"])
        if kind == "flip":
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif kind == "cut":
            del data[draw.randrange(len(data)) :]
        elif kind == "zero":
            at = draw.randrange(len(data))
            data[at : at + 64] = bytes(len(data[at : at + 64]))
        elif kind == "swap":
            data = bytearray(good[draw.choice(sorted(good))])
        (directory / name).write_bytes(data)
        if kind == "remove":
            (directory / name).unlink()
        target: dict[str, Any] = {**{key: torch.zeros(30, 10) for key in tensors}, "n": 0}
        error = failure(lambda target=target: checkpoint.load(store, target))
        if error is not None:
            named = str(directory / name) in str(error) or (name == "manifest.json" and isinstance(error, CheckpointNotFoundError))
            assert named, f"{kind} of {name}: {error}"
            assert not any(target[key].any() for key in tensors)
            outcomes["named"] += 1
        else:
            assert bytes(data) == good[name]
            assert all(torch.equal(target[key], value) for key, value in tensors.items())
            outcomes["right"] += 1
        (directory / name).write_bytes(good[name])
    assert outcomes["named"] > 20
