"""The commands and files by which schedulers start the agents of an attached pool."""

from __future__ import annotations

import errno
import html
import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from torch.distributed.run import get_args_parser

from labkit.cli import main
from labkit.controller.launch_text import Launch
from labkit.controller.node import Node
from labkit.controller.tables import arrival_html, arrival_text
from labkit.errors import InvalidPoolError
from labkit.wire.key_file import KeyFile
from labkit.wire.transport import Keys

LAUNCH = Launch(2, 8, "tcp://login:29600", "/keys/labkit.key", "first:29400", linger_s=600)


def test_torchrun_understands_the_command() -> None:
    words = shlex.split(LAUNCH.torchrun())
    assert words[0] == "torchrun"
    known = get_args_parser().parse_args(words[1:])
    assert (known.nnodes, known.nproc_per_node, known.rdzv_backend, known.rdzv_endpoint) == ("2", "1", "c10d", "first:29400")
    assert known.training_script == "labkit.worker"
    assert known.module
    script = ["--connect", "tcp://login:29600", "--key-file", "/keys/labkit.key", "--linger", "600"]
    assert known.training_script_args == script


def test_the_slurm_script_is_a_script_whose_first_machine_is_the_meeting_place(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(LAUNCH.slurm())
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=8\n" in LAUNCH.slurm()
    # What srun would be given on a machine where the scheduler says that gpu07 and gpu08 are ours.
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("scontrol", "echo gpu07; echo gpu08"), ("srun", 'for word in "$@"; do echo "$word"; done')):
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    environ = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_CPUS_ON_NODE": "64"}
    words = subprocess.run(["bash", str(script)], env=environ, check=True, capture_output=True, text=True).stdout.splitlines()
    assert words[words.index("--rdzv-endpoint") + 1] == "gpu07:29400"
    assert "--cpus-per-task=64" in words
    assert words[words.index("--connect") + 1] == "tcp://login:29600"


def test_the_manifests_hold_one_pod_a_machine_which_find_each_other() -> None:
    service, job = yaml.safe_load_all(LAUNCH.kubernetes("registry/labkit:1"))
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert (job["spec"]["completions"], job["spec"]["parallelism"], job["spec"]["completionMode"]) == (2, 2, "Indexed")
    assert service["spec"]["clusterIP"] == "None"  # no address of its own: its name stands for the pods
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert container["image"] == "registry/labkit:1"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert f"{job['metadata']['name']}-0.{pod['subdomain']}:29400" in container["command"]
    assert container["volumeMounts"][0]["mountPath"] == "/keys"


def test_without_gpus_no_scheduler_is_asked_for_any() -> None:
    launch = replace(LAUNCH, on_gpus=False)
    assert "gpus" not in launch.slurm()
    _, job = yaml.safe_load_all(launch.kubernetes())
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"] == {"requests": {"cpu": 8}}


@pytest.mark.parametrize("scheduler", ["slurm", "kubernetes"])
def test_the_command_that_the_notebook_shows_writes_the_same(scheduler: str) -> None:
    for launch in (replace(LAUNCH, rdzv_endpoint="login:29400"), replace(LAUNCH, rdzv_endpoint="login:29400", on_gpus=False)):
        result = CliRunner().invoke(main, shlex.split(launch.writer(scheduler))[1:])
        assert result.output.strip() == getattr(launch, scheduler)().strip()


def test_the_notebook_shows_what_people_and_schedulers_run() -> None:
    nodes = [Node(0), Node(1)]
    text, page = arrival_text(LAUNCH, nodes), arrival_html(LAUNCH, nodes)
    assert LAUNCH.torchrun() in text
    assert "labkit launch slurm --num-nodes 2" in text
    codes = [html.unescape(found) for found in re.findall(r"<code[^>]*>(.*?)</code>", page, flags=re.DOTALL)]
    in_pods = replace(LAUNCH, key_file="/etc/labkit/labkit.key")
    assert codes == [LAUNCH.torchrun(), LAUNCH.slurm().rstrip(), in_pods.kubernetes().rstrip()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--connect", "tcp://login"], "'tcp://login' is no address"),
        (["--connect", "tcp://login:0"], "'tcp://login:0' is no address"),
        (["--rdzv-endpoint", "first"], "'first' is no meeting place: write HOST:PORT"),
        (["--linger", "nan"], "write a positive number of seconds"),
        (["--linger", "0"], "write a positive number of seconds"),
    ],
)
def test_the_command_line_refuses_what_cannot_be_meant(options: list[str], message: str) -> None:
    known = ["--num-nodes", "2", "--workers-per-node", "8", "--connect", "tcp://login:29600"]
    refused = CliRunner().invoke(main, ["launch", "torchrun", *known, *options])
    assert refused.exit_code == 2
    assert message in refused.output


def test_the_command_line_writes_them_and_refuses_what_is_no_address() -> None:
    options = ["--num-nodes", "2", "--workers-per-node", "8", "--key-file", "/keys/labkit.key", "--linger", "600"]
    runner = CliRunner()
    asked = [*options, "--rdzv-endpoint", "first:29400", "--connect", "tcp://login:29600"]
    for scheduler, text in (("torchrun", LAUNCH.torchrun()), ("slurm", LAUNCH.slurm()), ("kubernetes", LAUNCH.kubernetes())):
        result = runner.invoke(main, ["launch", scheduler, *asked])
        assert result.output.strip() == text.strip()
    refused = runner.invoke(main, ["launch", "torchrun", *options, "--connect", "login"])
    assert refused.exit_code == 2
    assert "'login' is no address: write tcp://HOST:PORT" in refused.output


def test_a_key_file_is_private_and_comes_back_as_it_was(tmp_path: Path) -> None:
    keys = Keys.generate()
    path = tmp_path / "labkit.key"
    KeyFile.of(keys).write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert keys.server_secret.decode() not in path.read_text()
    found = KeyFile.read(path).keys()
    assert (found.server_public, found.client_secret) == (keys.server_public, keys.client_secret)


@pytest.mark.parametrize("kind", ["link", "dangling link", "folder"])
def test_s13_a_link_or_a_folder_in_a_key_file_s_place_is_refused_and_no_secret_stays(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "labkit.key", tmp_path / "target"
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(target)
    if kind == "link":
        target.write_text("mine")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InvalidPoolError, match=f"a {kind.rsplit(maxsplit=1)[-1]} is where the key file"):
        KeyFile.of(Keys.generate()).write(path)
    assert sorted(tmp_path.iterdir()) == before
    assert kind != "link" or target.read_text() == "mine"


def test_s13_a_key_file_is_made_exclusively_under_a_name_that_cannot_be_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / f"labkit.key.{os.getpid()}").symlink_to(target)  # a name that can be known
    opened: list[tuple[str, int, int]] = []
    real = os.open

    def recorded(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        opened.append((str(path), flags, mode))
        return real(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", recorded)
    for _ in range(2):
        KeyFile.of(Keys.generate()).write(tmp_path / "labkit.key")
    written = [(path, flags, mode) for path, flags, mode in opened if "labkit.key" in path and flags & os.O_WRONLY]
    assert len({path for path, _, _ in written}) == len(written) == 2
    assert all(flags & os.O_EXCL and flags & os.O_NOFOLLOW and mode == 0o600 for _, flags, mode in written)
    assert target.read_text() == "mine"


def test_s13_a_failure_on_the_way_leaves_no_secret_beside_the_key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InvalidPoolError, match="No space left"):
        KeyFile.of(Keys.generate()).write(tmp_path / "labkit.key")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (None, 0o600, "cannot be read: No such file or directory. Copy it here"),
        ("{}", 0o600, "is no key file of labkit"),
        ("no json", 0o600, "is no key file of labkit"),
        ("[]", 0o600, "is no key file of labkit"),
        ('{"server_public": "a", "client_public": "b", "client_secret": "c"}', 0o644, "Run: chmod 600"),
    ],
)
def test_a_key_file_that_cannot_be_trusted_is_refused(tmp_path: Path, content: str | None, mode: int, message: str) -> None:
    path = tmp_path / "labkit.key"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(InvalidPoolError) as caught:
        KeyFile.read(path)
    assert message in str(caught.value)
