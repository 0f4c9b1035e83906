"""Headers, indices and manifests: safetensors, DCP's metadata, JSON."""

from __future__ import annotations

import json
import pickle
import struct
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from labkit.checkpoint.index import manifest
from tests.hostile.attacks import NAMES, NUMBERS, ODD, attack, sound_archive, sound_dcp, sound_safetensors, spoilt

OUTSIDE = ("/etc/passwd", "../x", "a/../../x", "/dev/zero", "..", ".", "", "\0", "\ud800", "sub/x", "x" * 300, "x/" * 3000)


def tensor(random: Random, begin: int = 0, end: int = 16) -> dict[str, Any]:
    found: dict[str, Any] = {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}
    if random.random() < 0.7:
        found[random.choice(list(found))] = random.choice(
            [*ODD, [-2, -2], [4.0], ["4"], [True], [0, 2**63], [0] + [2**62] * 999, [16, 0], [8, 24], [0, 2**64], [4, 2**64], "F99"]
        )
    return found


@attack(24)
def safetensors_header(folder: Path, random: Random, canary: str) -> Path:
    header: dict[str, Any] = {
        "a": tensor(random),
        random.choice(["b", "", *NAMES[:5]]): tensor(random, random.choice((0, 8, 16, 20)), 32),
    }
    if random.random() < 0.4:
        header["__metadata__"] = random.choice(
            [*ODD, {"a": "b"}, {"DCP_SHARDING_INFO": "{"}, {"DCP_SHARDING_INFO": '{"a": {"saved_offsets": [-1]}}'}]
        )
    encoded = json.dumps(header, default=repr)
    if random.random() < 0.2:
        encoded = encoded[:-1] + ", " + encoded[1:]  # each name twice
    data = encoded.encode(random.choice(("utf-8", "utf-8", "utf-8", "utf-16", "utf-32-le", "utf-8-sig")))
    data = random.choice([data, data, data, b'{"a":' * 50_000, b"[" * 10**6, data + b"{}", data + b"\0", b""])
    length = random.choice([len(data)] * 5 + [len(data) + 1, 2**63, 100_000_001, 0])
    (folder / "x.safetensors").write_bytes(struct.pack("<Q", length) + data + bytes(random.choice((16, 32, 32, 33, 0))))
    return folder / "x.safetensors"


@attack(16)
def damaged_safetensors(folder: Path, random: Random, canary: str) -> Path:
    (folder / "x.safetensors").write_bytes(spoilt(sound_safetensors(), random))
    return random.choice([folder, folder / "x.safetensors"])


@attack(24)
def metadata_of_another_size(folder: Path, random: Random, canary: str) -> Path:
    """DCP's index with one or two fields that contradict the files."""
    path = sound_dcp(folder / "d") / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for _ in range(random.choice((1, 1, 2))):
        key = random.choice(["model.a", "model.b", "optim.state.0.exp_avg"])
        described = metadata.state_dict_metadata[key]
        place = next(index for index in metadata.storage_data if index.fqn == key)
        kind = random.randrange(8)
        if kind == 0:
            described.size = random.choice([torch.Size([2**40, 2**20]), torch.Size([0]), torch.Size([2**62, 2]), *ODD])
        elif kind == 1:
            described.chunks = [ChunkStorageMetadata(random.choice(ODD), random.choice([torch.Size([2**40]), *ODD]))]
        elif kind == 2:
            described.chunks = random.choice([described.chunks * 1000, [], *ODD])
        elif kind == 3:
            described.properties.dtype = random.choice([torch.int8, torch.complex128, torch.quint8, None, "float32"])
        elif kind == 4:
            metadata.storage_data[place] = replace(metadata.storage_data[place], relative_path=random.choice([*OUTSIDE, *ODD]))
        elif kind == 5:
            metadata.storage_data[place] = replace(
                metadata.storage_data[place], offset=random.choice(ODD), length=random.choice(ODD)
            )
        elif kind == 6:
            metadata.planner_data = random.choice([{key: random.choice(ODD)}, {key: ("optim", "state")}, {key: (2**40, -1)}, *ODD])
        else:
            setattr(metadata, random.choice(["state_dict_metadata", "storage_data", "version", "storage_meta"]), random.choice(ODD))
        if kind == 7:
            break
    path.write_bytes(pickle.dumps(metadata))
    return folder / "d"


@attack(20)
def index_of_shards(folder: Path, random: Random, canary: str) -> Path:
    """The index of safetensors or of torch's files."""
    (folder / "x.safetensors").write_bytes(sound_safetensors())
    (folder / "x.bin").write_bytes(sound_archive())
    name, shard = random.choice([("model.safetensors.index.json", "x.safetensors"), ("pytorch_model.bin.index.json", "x.bin")])
    if name.startswith("pytorch"):
        (folder / "x.safetensors").unlink()
    body = random.choice(
        [
            {"weight_map": random.choice(ODD)},
            {"weight_map": {"a": random.choice([*OUTSIDE, *ODD])}},
            {"weight_map": {random.choice(NAMES[:5]): shard, "a": shard}},
            {"weight_map": {f"w{number}": f"{number}.safetensors" for number in range(2000)}},
            {"weight_map": {"a": name}},
            random.choice(ODD),
        ]
    )
    data = json.dumps(body, default=repr).encode(random.choice(("utf-8", "utf-8", "utf-8", "utf-16")))
    (folder / name).write_bytes(
        random.choice([data, data, data, b"[" * 10**6, b"[[],[]," * 1000, b"9" * 10**5, b"", b'{"weight_map":' * 10**5])
    )
    return random.choice([folder, folder / name])


@attack(20)
def manifest_with_its_own_hash(folder: Path, random: Random, canary: str) -> Path:
    """A manifest that matches its hash but not its directory."""
    step = folder / "step_00000007"
    sound_dcp(step)
    files: Any = {path.name: {"size": path.stat().st_size, "hash": manifest.hash_file(path).hash} for path in step.iterdir()}
    body: dict[str, Any] = {
        "format": manifest.FORMAT,
        "version": 1,
        "step": 7,
        "world_size": 1,
        "hash": "xxh3_128",
        "about": {},
        "files": files,
    }
    if random.random() < 0.6:
        files[random.choice([*OUTSIDE, *(name for name in NAMES if name.isascii())])] = random.choice(
            [{"size": 0, "hash": "0"}, {"size": 2**70, "hash": ""}, *ODD]
        )
    else:
        body[random.choice(list(body))] = random.choice(ODD)
    body = json.loads(json.dumps(body, default=repr))
    body["self"] = manifest.hash_bytes(manifest._canonical(body))
    (step / "manifest.json").write_text(json.dumps(body))
    return random.choice([folder, step])


@attack(8)
def number_of_no_use(folder: Path, random: Random, canary: str) -> Path:
    """Values other than tensors that are hard to print or to calculate with."""
    value = random.choice([*NUMBERS, 10**4000, -(10**5000), float("inf"), "\x1b[2J" * 1000, b"\xff" * 10**5, list(range(10**5))])
    torch.save(
        {"model": {"w": torch.ones(2)}, "epoch": value, "optim": {"state": {0: {"step": value}}, "param_groups": value}},
        folder / "x.pt",
    )
    return folder / "x.pt"
