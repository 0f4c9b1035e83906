"""Write pickles opcode by opcode, in ways that no pickler would."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from tests.unit.zip_archives import replace_record


def assemble(*parts: bytes) -> bytes:
    """A pickle of protocol 4 without frames."""
    return b"\x80\x04" + b"".join(parts) + b"."


def name(module: str, attribute: str) -> bytes:
    """Push the object of a name, with an opcode that takes texts."""
    return text(module) + text(attribute) + b"\x93"


def line_name(module: str, attribute: str) -> bytes:
    """Push the object of a name, with an opcode that is followed by lines."""
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def text(value: str) -> bytes:
    """Push a text."""
    data = value.encode()
    return b"\x8c" + bytes([len(data)]) + data if len(data) < 256 else b"X" + struct.pack("<I", len(data)) + data


def call(function: bytes, *arguments: bytes) -> bytes:
    """Push the result of a call."""
    return function + b"(" + b"".join(arguments) + b"tR"


def doubled(start: bytes, opcode: bytes, times: int) -> bytes:
    """Push an object, and then repeatedly a pair of it with itself: 2**times objects in a few bytes each."""
    return start + b"\x94" + b"".join(get(number) + get(number) + opcode + b"\x94" for number in range(times))


def get(number: int) -> bytes:
    """Push a memoized object."""
    return b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)


def torch_file(path: Path, data: bytes) -> Path:
    """A torch.save file with one storage of four bytes, ``0``, and a given pickle."""
    file = io.BytesIO()
    torch.save({"a": torch.ones(1)}, file)
    path.write_bytes(replace_record(file.getvalue(), "data.pkl", data))
    return path


def dcp_folder(path: Path, data: bytes) -> Path:
    """A DCP directory with a given pickle as its index."""
    dcp.save({"a": torch.ones(2)}, checkpoint_id=path, no_dist=True)
    (path / ".metadata").write_bytes(data)
    return path


def storage(key: str = "0", numel: int = 1) -> bytes:
    """Push a reference to a storage of a torch.save file."""
    parts = (text("storage"), line_name("torch", "FloatStorage"), text(key), text("cpu"), b"J" + struct.pack("<i", numel))
    return b"(" + b"".join(parts) + b"tQ"
