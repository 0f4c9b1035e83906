"""Folders: things that are not files where a file is expected, names, files of ranks, steps, optimizers of another form."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from random import Random
from typing import Any

import torch

from tests.hostile.attacks import NAMES, ODD, attack, sound_archive, sound_dcp, sound_safetensors


def special(path: Path, random: Random) -> None:
    """Put something other than a regular file at a path."""
    kind = random.randrange(6)
    path.unlink(missing_ok=True)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to(random.choice(["/dev/zero", "/dev/random", "/dev/tty", "/proc/self/mem", "/proc/self/pagemap"]))
    elif kind == 2:
        path.symlink_to(path.name)
    elif kind == 3:
        path.mkdir()
    elif kind == 4:
        path.symlink_to("nothing")
    else:
        place = os.getcwd()
        os.chdir(path.parent)  # the path of a socket is short
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
        os.chdir(place)


@attack(28)
def no_regular_file(folder: Path, random: Random, canary: str) -> Path:
    kind = random.randrange(4)
    if kind == 0:
        name = random.choice([".metadata", "__0_0.distcp", "manifest.json"])
        special(sound_dcp(folder / "d") / name, random)
        return random.choice([folder / "d", folder / "d" / name])
    name = ("x.safetensors", "x.pt", "model.safetensors.index.json")[kind - 1]
    (folder / "y.safetensors").write_bytes(sound_safetensors()) if kind != 2 else (folder / "y.pt").write_bytes(sound_archive())
    special(folder / name, random)
    return random.choice([folder, folder / name])


@attack(16)
def name_that_drives_a_terminal(folder: Path, random: Random, canary: str) -> Path:
    name = random.choice(NAMES)
    kind = random.randrange(4)
    path = folder / (name + ("", ".pt", ".safetensors", "")[kind])
    if kind == 0:
        sound_dcp(path)
    elif kind == 3:
        path.write_bytes(b"no checkpoint at all")
    else:
        inner = name.encode(errors="replace").decode()
        path.write_bytes(sound_safetensors())
        if kind == 1:
            torch.save({"model": {inner: torch.ones(2), "a." + inner: torch.ones(1)}, inner: inner, "epoch": {inner: 1}}, path)
    return path


@attack(12)
def files_of_ranks(folder: Path, random: Random, canary: str) -> Path:
    names = [
        "x_rank_0.pt",
        "x_rank_1.pt",
        "x_rank_00.pt",
        "x_rank_99999999999999999999.pt",
        "x_rank_-1.pt",
        "rank_0_of_2.pt",
        "x_rank_\u0661.pt",
    ]
    for name in random.sample(names, 3):
        tensor = torch.ones(random.choice([(2,), (3,), (2, 2)]), dtype=random.choice([torch.float32, torch.int8]))
        torch.save({"w": tensor, "v": random.choice(ODD), "optim": {"state": {0: {"exp_avg": tensor}}}}, folder / name)
    return folder


@attack(16)
def optimizer_of_another_form(folder: Path, random: Random, canary: str) -> Path:
    def odd() -> Any:
        return random.choice(
            [*ODD, {0: 1}, {"params": None}, [{"params": 7}], [{"params": [[]]}], {0: {"exp_avg": torch.ones(3)}}, {(1, 2): 3}]
        )

    optimizer = random.choice(
        [
            {"state": odd(), "param_groups": odd()},
            {"state": {0: {"exp_avg": torch.ones(2), "step": odd()}}, "param_groups": [{"params": odd(), "lr": odd()}]},
            {"state": {"w": {"exp_avg": torch.ones(2)}, 0: odd()}, "param_groups": [{"params": ["w", odd()]}, odd()]},
            {"state": {10**6: {"step": torch.ones(0)}}, "param_groups": [odd(), odd()]},
        ]
    )
    torch.save(
        {"model": {"w": torch.ones(2)}, "optim": optimizer, **({} if random.random() < 0.5 else {"a": {"b": 1}, "a.b": 2})},
        folder / "x.pt",
    )
    return folder / "x.pt"


@attack(8)
def steps_of_a_store(folder: Path, random: Random, canary: str) -> Path:
    sound_dcp(folder / "step_00000001")
    for _ in range(2):
        name = random.choice(
            [
                "step_1",
                "step_000000002",
                "step_" + "9" * 200,
                "step_\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661",
                "step_00000009",
                "step_-0000001",
            ]
        )
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "manifest.json").write_text(random.choice(["", "{}", "[]", '{"format": "labkit-checkpoint"}', "null"]))
    return folder


@attack(8)
def nothing_in_particular(folder: Path, random: Random, canary: str) -> Path:
    begin = random.choice(
        [
            b"",
            b"PK\x03\x04",
            b"PK\x05\x06" + bytes(18),
            b"\x80\x02",
            b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
            bytes(7) + b"\0{",
            b"ustar",
        ]
    )
    path = folder / random.choice(["x.pt", "x.safetensors", "x.bin", "x", "x.distcp", ".metadata", "model.safetensors.index.json"])
    path.write_bytes(begin + random.randbytes(random.choice((0, 1, 100, 100_000))))
    return random.choice([path, folder])
