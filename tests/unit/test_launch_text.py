"""The commands and files with which schedulers start the agents of an attached pool."""

from __future__ import annotations

import errno
import html
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from labkit import WorkerPool, doctor
from labkit.cli import main
from labkit.controller.machines.agents import LocalAgents
from labkit.controller.machines.launch_text import TRUST, Launch
from labkit.controller.machines.node import Node
from labkit.controller.machines.tables import arrival_html, arrival_text
from labkit.errors import InvalidPoolError, WorkerStartError
from labkit.wire.key_file import KeyFile, remove_private
from labkit.wire.transport import Keys
from labkit.worker.__main__ import main as agent_main

LAUNCH = Launch(2, 8, "tcp://login:29600", "/keys/labkit.key", linger_s=600)


def understood(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if the agent's own command line does not accept these words; it ends at the key file, which does not exist."""
    monkeypatch.setattr(sys, "argv", words)
    assert agent_main() == 1


def test_s1_the_command_starts_an_agent_and_no_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(LAUNCH.command())
    assert words[:4] == ["python", "-P", "-m", "labkit.worker"]
    assert words[4:] == ["--connect", "tcp://login:29600", "--key-file", "/keys/labkit.key", "--linger", "600"]
    understood(words[3:], monkeypatch)
    assert "the key file /keys/labkit.key cannot be read" in capsys.readouterr().err
    for text in (LAUNCH.command(), LAUNCH.slurm(), LAUNCH.kubernetes()):
        assert "torchrun" not in text
        assert "torch.distributed.run" not in text


def test_s1_the_slurm_script_starts_one_agent_on_each_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "job.sh"
    script.write_text(LAUNCH.slurm())
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=8\n" in LAUNCH.slurm()
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "srun").write_text('#!/bin/bash\nfor word in "$@"; do echo "$word"; done\n')
    (folder / "srun").chmod(0o755)
    environ = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_CPUS_ON_NODE": "64"}
    words = subprocess.run(["bash", str(script)], env=environ, check=True, capture_output=True, text=True).stdout.splitlines()
    assert "--cpus-per-task=64" in words
    assert words[words.index("python") :] == shlex.split(LAUNCH.command())
    understood(words[words.index("labkit.worker") :], monkeypatch)
    assert "cannot be read" in capsys.readouterr().err


def test_s1_the_manifest_holds_one_pod_a_machine_which_knows_its_index() -> None:
    (job,) = yaml.safe_load_all(LAUNCH.kubernetes("registry/labkit:1"))
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert (job["spec"]["completions"], job["spec"]["parallelism"], job["spec"]["completionMode"]) == (2, 2, "Indexed")
    assert container["image"] == "registry/labkit:1"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert container["command"] == shlex.split(LAUNCH.command())
    assert container["volumeMounts"][0]["mountPath"] == "/keys"


def test_s1_what_torch_trusts_is_told_beside_the_command_by_doctor_and_in_the_readme() -> None:
    nodes = [Node(0), Node(1)]
    finding, _ = doctor._trust()
    readme = Path(__file__).parents[2] / "README.md"
    sources = (arrival_text(LAUNCH, nodes), html.unescape(arrival_html(LAUNCH, nodes)), finding.value, readme.read_text())
    for text in sources:
        assert TRUST.rstrip(".") in text


def test_without_gpus_no_scheduler_is_asked_for_any() -> None:
    launch = replace(LAUNCH, on_gpus=False)
    assert "gpus" not in launch.slurm()
    (job,) = yaml.safe_load_all(launch.kubernetes())
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"] == {"requests": {"cpu": 8}}


@pytest.mark.parametrize("scheduler", ["slurm", "kubernetes"])
def test_the_command_that_the_notebook_shows_writes_the_same(scheduler: str) -> None:
    for launch in (LAUNCH, replace(LAUNCH, on_gpus=False)):
        result = CliRunner().invoke(main, shlex.split(launch.writer(scheduler))[1:])
        assert result.output.strip() == getattr(launch, scheduler)().strip()


def test_the_notebook_shows_what_people_and_schedulers_run() -> None:
    nodes = [Node(0), Node(1)]
    text, page = arrival_text(LAUNCH, nodes), arrival_html(LAUNCH, nodes)
    assert LAUNCH.command() in text
    assert "labkit launch slurm --num-nodes 2" in text
    codes = [html.unescape(found) for found in re.findall(r"<code[^>]*>(.*?)</code>", page, flags=re.DOTALL)]
    in_pods = replace(LAUNCH, key_file="/etc/labkit/labkit.key")
    assert codes == [LAUNCH.command(), LAUNCH.slurm().rstrip(), in_pods.kubernetes().rstrip()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--connect", "tcp://login"], "'tcp://login' is no address"),
        (["--connect", "tcp://login:0"], "'tcp://login:0' is no address"),
        (["--linger", "nan"], "write a positive number of seconds"),
        (["--linger", "0"], "write a positive number of seconds"),
    ],
)
def test_the_command_line_refuses_what_cannot_be_meant(options: list[str], message: str) -> None:
    known = ["--num-nodes", "2", "--workers-per-node", "8", "--connect", "tcp://login:29600"]
    refused = CliRunner().invoke(main, ["launch", "shell", *known, *options])
    assert refused.exit_code == 2
    assert message in refused.output


def test_the_command_line_writes_them_and_refuses_what_is_no_address() -> None:
    options = ["--num-nodes", "2", "--workers-per-node", "8", "--key-file", "/keys/labkit.key", "--linger", "600"]
    runner = CliRunner()
    asked = [*options, "--connect", "tcp://login:29600"]
    for scheduler, text in (("shell", LAUNCH.command()), ("slurm", LAUNCH.slurm()), ("kubernetes", LAUNCH.kubernetes())):
        result = runner.invoke(main, ["launch", scheduler, *asked])
        assert result.output.strip() == text.strip()
    refused = runner.invoke(main, ["launch", "shell", *options, "--connect", "login"])
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
    with pytest.raises(InvalidPoolError, match=f"the key file cannot be written: .* is a {kind.rsplit(maxsplit=1)[-1]}"):
        KeyFile.of(Keys.generate()).write(path)
    assert sorted(tmp_path.iterdir()) == before
    assert kind != "link" or target.read_text() == "mine"


def test_s13_a_key_file_is_made_exclusively_under_a_name_that_cannot_be_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / f"labkit.key.{os.getpid()}").symlink_to(target)  # a name that can be guessed
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
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InvalidPoolError, match="No space left"):
        KeyFile.of(Keys.generate()).write(tmp_path / "labkit.key")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("who", ["the notebook", "a later process of that pid", "another user's process", "nobody", "an old file"])
def test_v10_a_key_file_is_in_use_by_the_process_that_wrote_it_and_no_other(who: str) -> None:
    other = subprocess.Popen(["sleep", "60"], user=65534 if who.startswith("another") and os.geteuid() == 0 else None)
    try:
        start = Path(f"/proc/{other.pid}/stat").read_text().split()[21]
        owner = {"a later process of that pid": f"{other.pid}.{int(start) - 1}", "an old file": str(other.pid)}.get(who)
        made = replace(KeyFile.of(Keys.generate()), owner=f"{owner or f'{other.pid}.{start}'}@{socket.gethostname()}")
        if who == "nobody":
            other.kill()
            other.wait()
        assert made.in_use == (who == "the notebook" or (who.startswith("another") and os.geteuid() != 0))
    finally:
        other.kill()
        other.wait()
    assert not KeyFile.of(Keys.generate()).in_use  # this process itself
    pid, start = KeyFile.of(Keys.generate()).owner.partition("@")[0].split(".")
    assert (int(pid), start) == (os.getpid(), Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


@pytest.mark.parametrize("there", ["the file", "another pool's", "a link", "a folder", "nothing", "no text"])
def test_v10_only_the_key_file_that_was_written_is_removed(tmp_path: Path, there: str) -> None:
    path = tmp_path / "labkit.key"
    made = KeyFile.of(Keys.generate())
    made.write(path)
    if there != "the file":
        path.rename(tmp_path / "away")
    if there == "another pool's":
        KeyFile.of(Keys.generate()).write(path)
    elif there == "a link":
        path.symlink_to("away")
    elif there == "a folder":
        path.mkdir()
    elif there == "no text":
        path.write_bytes(b"\xff")
    remove_private(path, asdict(made))
    assert os.path.lexists(path) == (there not in ("the file", "nothing"))
    assert (tmp_path / "away").exists() == (there != "the file")


def test_v10_a_folder_exchanged_while_a_key_file_is_looked_at_costs_no_file_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = KeyFile.of(Keys.generate())
    for name in ("folder", "precious"):
        (tmp_path / name).mkdir()
        made.write(tmp_path / name / "labkit.key")
    read = json.load

    def exchanged(file: Any) -> Any:
        (tmp_path / "folder").rename(tmp_path / "away")
        (tmp_path / "precious").rename(tmp_path / "folder")
        return read(file)

    monkeypatch.setattr(json, "load", exchanged)
    remove_private(tmp_path / "folder" / "labkit.key", asdict(made))
    assert (os.listdir(tmp_path / "folder"), os.listdir(tmp_path / "away")) == (["labkit.key"], [])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_l4_a_key_file_of_another_user_is_refused_and_one_behind_a_link_is_read(tmp_path: Path) -> None:
    path = tmp_path / "labkit.key"
    KeyFile.of(Keys.generate()).write(tmp_path / "secret")
    path.symlink_to("secret")  # as Kubernetes mounts it
    KeyFile.read(path)
    os.chown(path, 65534, 65534)
    with pytest.raises(InvalidPoolError, match="belongs to another user"):
        KeyFile.read(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("kind", ["folder", "open folder", "link"])
def test_l5_agents_start_in_no_folder_that_somebody_else_has_made_under_its_name(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "labkit-key-x"
    LocalAgents(folder).begin()
    LocalAgents(folder).begin()
    folder.rmdir()
    if kind == "link":
        folder.symlink_to(tmp_path)
    else:
        folder.mkdir(mode=0o700)
        if kind == "folder":
            os.chown(folder, 65534, 65534)
        else:
            folder.chmod(0o777)
    with pytest.raises(WorkerStartError, match="not this user's own any more"):
        LocalAgents(folder).begin()


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (None, 0o600, "cannot be read: No such file or directory. Copy it here"),
        ("{}", 0o600, "is not a labkit key file"),
        ("no json", 0o600, "is not a labkit key file"),
        ("[]", 0o600, "is not a labkit key file"),
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


@pytest.mark.timeout(20)
def test_s13_a_fifo_in_a_key_file_s_place_is_refused_and_holds_nobody(tmp_path: Path) -> None:
    path = tmp_path / "labkit.key"
    os.mkfifo(path, 0o600)
    with pytest.raises(InvalidPoolError, match=r"labkit\.key is a FIFO, and was not opened. Copy it here"):
        KeyFile.read(path)
    with pytest.raises(InvalidPoolError, match=r"labkit\.key is a FIFO"):
        WorkerPool.attach(1, 1, "cpu", listen="tcp://127.0.0.1:*", host="127.0.0.1", key_file=path, start_timeout_s=4)
    assert os.listdir(tmp_path) == ["labkit.key"]


def test_s13_a_key_file_that_is_a_link_to_one_is_read_since_kubernetes_mounts_it_so(tmp_path: Path) -> None:
    KeyFile.of(Keys.generate()).write(tmp_path / "secret")
    (tmp_path / "labkit.key").symlink_to("secret")
    assert KeyFile.read(tmp_path / "labkit.key") == KeyFile.read(tmp_path / "secret")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a link to another user")
def test_s13_no_key_file_is_written_behind_a_link_that_another_user_has_made(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    os.chown(tmp_path / "link", 65534, 65534, follow_symlinks=False)
    with pytest.raises(InvalidPoolError, match="is a link that another user has made"):
        KeyFile.of(Keys.generate()).write(tmp_path / "link" / "labkit.key")
    assert os.listdir(tmp_path / "real") == []
