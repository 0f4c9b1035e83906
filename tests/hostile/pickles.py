"""Pickles that call, grow, or are damaged."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tests.hostile.attacks import MODULE, archive, attack, sound_archive, sound_dcp, spoilt


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def named(module: str, name: str, random: Random) -> bytes:
    old = b"c" + module.encode() + b"\n" + name.encode() + b"\n"
    return old if random.random() < 0.4 else text(module) + text(name) + b"\x93"


def call(random: Random, canary: str) -> bytes:
    """A pickle's bytes that call something, without beginning and end."""
    code, shell = f"open({canary!r}, 'w').close()", f"touch {canary}"
    module, name, *arguments = random.choice(
        [
            ("builtins", "exec", code),
            ("builtins", "eval", f"open({canary!r}, 'w')"),
            ("builtins", "__import__", MODULE),
            ("builtins", "open", canary, "w"),
            ("os", "system", shell),
            ("posix", "system", shell),
            ("subprocess", "getoutput", shell),
            ("pathlib", "Path.touch", canary),
            ("importlib", "import_module", MODULE),
            ("runpy", "run_module", MODULE),
            ("timeit", "timeit", code),
            ("shutil", "copy", "/etc/hostname", canary),
            ("torch.distributed.checkpoint.filesystem", "os.system", shell),
            ("torch.distributed.checkpoint.metadata", "os.system", shell),
            ("torch.distributed.checkpoint.filesystem", "io.open", canary, "w"),
            ("torch.distributed.checkpoint.filesystem", "_metadata.sys.modules", shell),
            ("torch._utils", "sys.modules", shell),
            ("torch.serialization", "os.system", shell),
            ("collections", "_sys.modules", shell),
            (MODULE, "anything"),
        ]
    )
    packed = b"(" + b"".join(map(text, arguments)) + b"t"
    return named(module, name, random) + packed + random.choice((b"R", b"R", b"\x81"))


def pickled(body: bytes, protocol: int = 4) -> bytes:
    return b"\x80" + bytes([protocol]) + body + b"."


@attack(24)
def pickle_that_calls(folder: Path, random: Random, canary: str) -> Path:
    body = call(random, canary)
    getter = named("builtins", "getattr", random) + b"(" + named("torch.distributed.checkpoint.filesystem", "os", random)
    body = random.choice(
        [
            body,
            b"}" + text("w") + body + b"s",
            b"}" + body + text("w") + b"s",
            b"](" + body + b"e",
            getter + text("system") + b"tR(" + text(f"touch {canary}") + b"tR",
            named("collections", "OrderedDict", random) + b")R" + body + b"b",
            named("torch._tensor", "_rebuild_from_type_v2", random) + b"(" + body + body + b")NtR",
            b"(" + text(f"touch {canary}") + b"ios\nsystem\n",
            b"(" + named("os", "system", random) + text(f"touch {canary}") + b"o",
        ]
    )
    index = pickled(body, random.choice((2, 3, 4, 5)))
    place = random.randrange(3)
    if place == 0:
        (sound_dcp(folder / "d") / ".metadata").write_bytes(index)
        return folder / "d"
    (folder / "x.pt").write_bytes(index if place == 1 and random.random() < 0.3 else archive(index))
    return folder / "x.pt"


@attack(8)
def value_that_calls(folder: Path, random: Random, canary: str) -> Path:
    class Call:
        def __reduce__(self) -> Any:
            return random.choice([(os.system, (f"touch {canary}",)), (exec, (f"open({canary!r}, 'w')",)), (open, (canary, "w"))])

    value = random.choice([Call(), [Call()], {"x": Call()}, (1, Call())])
    if random.random() < 0.5:
        dcp.save({"w": torch.ones(2), "v": value}, checkpoint_id=folder / "d", no_dist=True)
        return folder / "d"
    torch.save({"w": torch.ones(2), "v": value}, folder / "x.pt", _use_new_zipfile_serialization=random.random() < 0.8)
    return folder / "x.pt"


def doubled(form: bytes, depth: int) -> bytes:
    """A value that holds the one before it twice, at the @ of its form: 2**depth leaves in a few bytes."""
    body = b"K\x01r" + struct.pack("<I", 0)
    for level in range(depth):
        body += b"0" + (b"j" + struct.pack("<I", level)).join(form.split(b"@")) + b"r" + struct.pack("<I", level + 1)
    return body


@attack(24)
def pickle_that_grows(folder: Path, random: Random, canary: str) -> Path:
    depth, many = random.choice((20, 40, 60, 400)), random.choice((900, 10_000, 200_000))
    chain = named("builtins", "getattr", random)
    body = random.choice(
        [
            doubled(b"](@@e", depth),
            doubled(b"(@@t", depth),
            doubled(b"}(K\x00@K\x01@u", depth),
            b"}" + doubled(b"(@@t", depth) + b"K\x01s",
            b"}" + text("w") + doubled(b"(@@t", depth) + b"s",
            b"]" * many + b"a" * (many - 1),
            b"(" * many + b"t" * many,
            (b"}K\x00") * many + b"N" + b"s" * many,
            b"K\x01r" + struct.pack("<I", random.choice((2**31, 2**32 - 1, 10**8))),
            b"\x8d" + struct.pack("<Q", random.choice((1 << 40, 1 << 60, 2**63))) + b"x",
            b"\x96" + struct.pack("<Q", 1 << 50),
            b"\x95" + struct.pack("<Q", 1 << 60) + b"N",
            b"\x8b" + struct.pack("<i", random.choice((-1, 2**31 - 1))) + b"x",
            b"\x8b" + struct.pack("<i", 200_000) + b"\x7f" * 200_000,
            b"V" + b"x" * 200_000 + b"\n",
            b"L" + b"9" * 200_000 + b"L\n",
            named("builtins", "bytearray", random) + b"J\xff\xff\xff\x7f\x85R",
            named("builtins", "set", random) + doubled(b"(@@t", depth) + b"\x85R",
            named("collections", "OrderedDict", random) + b"(" + doubled(b"](@@e", depth) + b"tR",
            (chain + b"(") * 2000 + b"N" + (text("x") + b"tR") * 2000,
            b"N2" + b"2" * many,
            b"](" + b"N" * many + b"e",
        ]
    )
    if random.random() < 0.3:
        (sound_dcp(folder / "d") / ".metadata").write_bytes(pickled(body))
        return folder / "d"
    (folder / "x.pt").write_bytes(archive(pickled(body)))
    return folder / "x.pt"


@attack(24)
def damaged_pickle(folder: Path, random: Random, canary: str) -> Path:
    if random.random() < 0.5:
        path = sound_dcp(folder / "d") / ".metadata"
        path.write_bytes(spoilt(path.read_bytes(), random))
        return folder / "d"
    with zipfile.ZipFile(io.BytesIO(sound_archive())) as source:
        index = source.read("archive/data.pkl")
    records = tuple((f"x/data/{number}", bytes(64)) for number in range(1, 4))
    (folder / "x.pt").write_bytes(archive(spoilt(index, random), extra=records))
    return folder / "x.pt"
