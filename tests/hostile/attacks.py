"""Hostile checkpoints from a seed: made to run code, to use up time or memory, or to be read in two ways.

An attack writes one file or folder below a directory and returns the path that a victim would open. A random generator, seeded with
the attack's name and number, chooses the names, the changed bytes and the depth, so the attack can be repeated.
"""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save

# The module in the folder, and what its import or a call writes.
MODULE, CANARY = "evil_module", "canary"
Attack = Callable[[Path, Random, str], Path]
ATTACKS: dict[str, tuple[int, Attack]] = {}
NUMBERS = (-1, 0, 1, 7, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63))
ODD: tuple[Any, ...] = (
    *NUMBERS,
    None,
    True,
    1.5,
    float("nan"),
    "x",
    "",
    b"",
    (),
    [],
    {},
    [[]],
    {"x": []},
    (2**40,) * 3,
    "../x",
    "\0",
)
NAMES = (
    "-rf",
    "--help",
    "\x1b[2J\x1b]0;x\x07",
    "a\nb",
    "\u202egnp",
    "\udcff\udcfe",
    "x" * 240,
    " ",
    "~",
    "$(touch canary)",
    "%s{x}",
    "*",
)


@dataclass(frozen=True)
class Hostile:
    """One attack with its parameters."""

    kind: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.number}"

    def make(self, folder: Path) -> Path:
        """Write it below an empty folder; code that is run creates the canary file."""
        (folder / f"{MODULE}.py").write_text(f"open({str(folder / CANARY)!r}, 'w').close()\n")
        (folder / "in").mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ATTACKS[self.kind][1](folder / "in", Random(self.name), str(folder / CANARY))


def attack(count: int) -> Callable[[Attack], Attack]:
    """Register an attack under its function's name, to be generated that many times."""

    def register(function: Attack) -> Attack:
        ATTACKS[function.__name__] = count, function
        return function

    return register


# Sound checkpoints, from which the damaged ones are made.


def state() -> dict[str, Any]:
    moments = {"state": {0: {"exp_avg": torch.ones(2, 3), "step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    return {"model": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}, "optim": moments, "epoch": 3, "names": ["x", "y"]}


@cache
def sound_archive() -> bytes:
    file = io.BytesIO()
    torch.save(state(), file)
    return file.getvalue()


@cache
def sound_safetensors() -> bytes:
    return save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}, {"format": "pt"})


def sound_dcp(folder: Path) -> Path:
    dcp.save(state(), checkpoint_id=folder, no_dist=True)
    return folder


def archive(
    index: bytes, *, stem: str = "x", compression: int = zipfile.ZIP_STORED, extra: tuple[tuple[str, bytes], ...] = ()
) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as made:
        for name, data in ((f"{stem}/data.pkl", index), (f"{stem}/byteorder", b"little"), (f"{stem}/data/0", bytes(64)), *extra):
            made.writestr(name, data)
    return file.getvalue()


def spoilt(data: bytes, random: Random, first: int = 0) -> bytes:
    """The bytes with a few changed, cut off, doubled or moved."""
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        at = random.randrange(first, max(first + 1, len(found)))
        kind = random.randrange(5)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << random.randrange(8)
        elif kind == 1 and at < len(found):
            found[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif kind == 2:
            del found[at : at + random.choice((1, 8, len(found)))]
        elif kind == 3:
            found[at:at] = found[at : at + 16]
        else:
            found[at : at + 8] = struct.pack("<Q", random.choice((2**63, 2**64 - 1, 2**32 - 1, 1 << 40)))
    return bytes(found)
