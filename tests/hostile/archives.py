"""Zip archives that can be read in two ways, are damaged, or hold tensors whose size does not match their bytes."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import torch

from tests.hostile.attacks import NUMBERS, archive, attack, sound_archive, sound_dcp, spoilt
from tests.hostile.pickles import call, pickled, text


class _Storage:
    def __init__(self, key: Any, numel: Any) -> None:
        self.pid = ("storage", torch.FloatStorage, key, "cpu", numel)


class _Tensor:
    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, (*self.arguments, False, {})


class _Pickler(pickle.Pickler):
    def persistent_id(self, item: Any) -> Any:
        return item.pid if isinstance(item, _Storage) else None


@attack(24)
def tensor_of_another_size(folder: Path, random: Random, canary: str) -> Path:
    """A tensor whose sizes, strides, offset or storage do not fit its 64 bytes of data."""
    sizes: Any = random.choice(
        [(2**40,), (2**20, 2**20), (2**62, 4), (-1,), (0, 2**62, 2**62), (1.5,), ("x",), 3, (2,) * 100, (16,)]
    )
    strides: Any = random.choice([(0,), (0, 0), (1,), (-1,), (2**62,), (2**63,), ("x",), (), (1,) * 100])
    offset = random.choice(NUMBERS)
    key = random.choice(["0", "0", "0", "1", "../data.pkl", "", 0, None, "0\0"])
    numel = random.choice([16, 16, *NUMBERS])
    wanted = random.choice(
        [(sizes, (0,) * 100 if isinstance(sizes, int) else (0,) * len(sizes), 0, "0", 16), (sizes, strides, offset, key, numel)]
    )
    sizes, strides, offset, key, numel = wanted
    file = io.BytesIO()
    _Pickler(file, protocol=2).dump({"w": _Tensor(_Storage(key, numel), offset, sizes, strides), "v": [1]})
    (folder / "x.pt").write_bytes(archive(file.getvalue()))
    return folder / "x.pt"


@attack(20)
def archive_of_two_meanings(folder: Path, random: Random, canary: str) -> Path:
    """Records twice, in other case, outside the folder, compressed, or with sizes that the directory makes up."""
    index, evil = pickled(b"}" + text("w") + b"K\x01s"), pickled(call(random, canary))
    first, second = random.choice([(index, evil), (evil, index)])
    name = random.choice(
        ["x/data.pkl", "X/DATA.PKL", "x/DATA.pkl", "y/data.pkl", "../x/data.pkl", "/x/data.pkl", "x//data.pkl", "x/./data.pkl"]
    )
    kind = random.randrange(4)
    if kind == 0:
        data = archive(first, extra=((name, second),))
    elif kind == 1:
        data = archive(first + bytes(random.choice((10**5, 10**7))), compression=zipfile.ZIP_DEFLATED)
    elif kind == 2:
        data = archive(first, extra=(("x/constants.pkl", second), ("x/version", b"3"), ("x/.data/serialization_id", b"1")))
    else:
        whole = archive(first)
        at = whole.rfind(b"PK\x01\x02") + random.choice((10, 16, 20, 24, 28, 42))
        data = whole[:at] + struct.pack("<I", random.choice((0, 1, 2**31, 2**32 - 1))) + whole[at + 4 :]
    (folder / "x.pt").write_bytes(data)
    return folder / "x.pt"


@attack(24)
def damaged_archive(folder: Path, random: Random, canary: str) -> Path:
    data = sound_archive()
    first = random.choice((0, data.rfind(b"PK\x05\x06"), data.find(b"PK\x01\x02")))
    if random.random() < 0.4:
        path = sound_dcp(folder / "d") / "__0_0.distcp"
        path.write_bytes(spoilt(path.read_bytes(), random))
        return folder / "d"
    (folder / "x.pt").write_bytes(spoilt(data, random, first))
    return folder / "x.pt"
