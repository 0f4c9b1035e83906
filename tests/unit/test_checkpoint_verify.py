"""Each planted fault is found and named, and a sound checkpoint has no finding."""

from __future__ import annotations

import gc
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from labkit import checkpoint
from labkit.checkpoint.checks.findings import Report
from labkit.checkpoint.checks.verification import verify
from labkit.checkpoint.checks.verify_data import each
from labkit.checkpoint.cli import checkpoint as command
from labkit.checkpoint.errors import CheckpointError, CheckpointNotFoundError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def build() -> nn.Module:
    return Net()


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A step of a store, with a manifest."""
    model, optimizer = trained()
    return checkpoint.save(tmp_path / "store", {"model": model, "optimizer": optimizer, "epoch": 3}, 1)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A checkpoint as DCP itself writes it, without a manifest."""
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": checkpoint.optimizer_state(optimizer, {("model",): model}), "epoch": 3}
    dcp.save(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    return tmp_path / "plain"


def codes(report: Report) -> set[str]:
    return {finding.code for finding in report.findings}


def test_sound_checkpoints_of_every_kind_have_no_finding(store: Path, plain: Path, tmp_path: Path) -> None:
    model, _ = trained()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for path in (store, store.parent, plain, tmp_path / "model.pt", tmp_path / "model.safetensors"):
        report = verify(path, finite=True)
        assert report.findings == []
        assert report.checked["tensors"] >= 4
    assert verify(store, model=Net()).findings == []
    for path in (tmp_path / "model.pt", tmp_path / "model.safetensors"):
        assert verify(path, against=tmp_path / "model.pt").findings == []
    assert verify(store, against=plain).findings == []


def flip(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(data)


def flip_payload(folder: Path, key: str) -> None:
    """Flip a bit of a tensor's data; most other bytes of a small archive are padding that is never read."""
    found = checkpoint.open_checkpoint(folder)
    entry = found.tensors[key]
    with checkpoint.Reader(found) as reader:
        start, _ = reader.data_start(entry, entry.chunks[0])
    path = folder / entry.chunks[0].file
    data = bytearray(path.read_bytes())
    data[start + 5] ^= 1
    path.write_bytes(data)


def edit_metadata(path: Path, change: Callable[[Metadata], None]) -> None:
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def drop_chunk(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.first.weight"].chunks = []


def shrink_chunk(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.first.weight"].chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([5, 4]))]


def double_chunk(metadata: Metadata) -> None:
    described = metadata.state_dict_metadata["model.first.weight"]
    described.chunks = described.chunks * 2


def move_chunk(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.first.weight"].size = torch.Size([5, 4])


def other_dtype(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.first.weight"].properties.dtype = torch.float64


def swap_places(metadata: Metadata) -> None:
    storage = metadata.storage_data
    one, two = (
        next(index for index in storage if index.fqn == f"optimizer.state.first.weight.{piece}")
        for piece in ("exp_avg", "exp_avg_sq")
    )
    storage[two] = storage[one]


def lose_state(metadata: Metadata) -> None:
    metadata.state_dict_metadata = {
        key: value for key, value in metadata.state_dict_metadata.items() if not key.startswith("optimizer.state.second.bias")
    }


def lose_piece(metadata: Metadata) -> None:
    del metadata.state_dict_metadata["optimizer.state.second.bias.exp_avg"]


INDEX_FAULTS = [
    (drop_chunk, "uncovered", "first.weight"),
    (shrink_chunk, "uncovered", "first.weight"),
    (double_chunk, "overlapping", "first.weight"),
    (move_chunk, "outside", "first.weight"),
    (other_dtype, "unreadable", "first.weight"),
    (swap_places, "shared-bytes", "exp_avg"),
    (lose_state, "no-state", "second.bias"),
    (lose_piece, "partial-state", "second.bias"),
]


@pytest.mark.parametrize(("change", "code", "words"), INDEX_FAULTS, ids=[change.__name__ for change, *_ in INDEX_FAULTS])
def test_a_fault_in_the_index_is_found_and_named(plain: Path, change: Callable[[Metadata], None], code: str, words: str) -> None:
    edit_metadata(plain, change)
    report = verify(plain)
    found = [finding for finding in report.findings if finding.code == code]
    assert found, codes(report)
    assert words in found[0].line()
    assert "Consequence: " in found[0].line()


def test_a_missing_a_cut_and_a_stray_file_are_found(plain: Path) -> None:
    shard = plain / "__0_0.distcp"
    data = shard.read_bytes()
    shard.write_bytes(data[:-10])
    assert "short-file" in codes(verify(plain))
    shard.rename(plain / "__7_0.distcp")
    assert codes(verify(plain)) >= {"missing-file", "stray-file"}


def test_a_flipped_bit_is_found_with_and_without_a_manifest(store: Path, plain: Path, tmp_path: Path) -> None:
    for folder in (store, plain):
        flip_payload(folder, "model.first.weight")
        report = verify(folder)
        assert codes(report) == {"changed-content"}
        assert not report.ok
        assert "__0_0.distcp" in report.findings[0].where
    torch.save({"a": torch.arange(1000.0)}, tmp_path / "x.pt")
    flip(tmp_path / "x.pt")
    assert codes(verify(tmp_path / "x.pt")) == {"changed-content"}


def test_every_flipped_bit_of_a_published_step_is_found(store: Path) -> None:
    file = store / "__0_0.distcp"
    good = file.read_bytes()
    for part in range(1, 20):
        file.write_bytes(good)
        flip(file, part / 20)
        assert not verify(store).ok
    file.write_bytes(good)
    assert verify(store).ok


def test_a_shard_of_another_checkpoint_is_found_by_the_manifest(store: Path, tmp_path: Path) -> None:
    model, optimizer = trained()
    other = checkpoint.save(tmp_path / "other", {"model": model, "optimizer": optimizer, "epoch": 4}, 1)
    (store / "__0_0.distcp").write_bytes((other / "__0_0.distcp").read_bytes())
    assert "changed-content" in codes(verify(store))


def test_an_overwrite_that_stopped_half_way_is_suspected_by_the_files_times(plain: Path) -> None:
    later = (plain / ".metadata").stat().st_mtime + 60
    os.utime(plain / "__0_0.distcp", (later, later))
    report = verify(plain)
    assert codes(report) == {"late-file"}
    assert report.ok


def with_steps(folder: Path, steps: dict[str, Any]) -> Path:
    """A DCP checkpoint whose optimizer has counted ``steps``."""
    state = {name: {"step": count, "exp_avg": torch.ones(2)} for name, count in steps.items()}
    groups = [{"params": [*steps], "lr": 0.1}]
    model = {name: torch.zeros(2) for name in steps}
    dcp.save({"model": model, "optimizer": {"state": state, "param_groups": groups}}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("as_stored", [torch.tensor, lambda number: torch.tensor([number]), int])
def test_step_counters_that_disagree_are_a_warning_with_values_and_files(tmp_path: Path, as_stored: Callable[[float], Any]) -> None:
    even = with_steps(tmp_path / "even", {name: as_stored(4.0) for name in "abc"})
    assert verify(even).findings == []
    assert verify(even).checked["step counters"] == 3
    report = verify(with_steps(tmp_path / "uneven", {"a": as_stored(4.0), "b": as_stored(4.0), "c": as_stored(2.0)}))
    (found,) = report.findings
    assert (found.code, found.where, report.ok) == ("uneven-steps", "optimizer", True)
    assert found.what == ("its step counters disagree: 4 (2 counters in __0_0.distcp), 2 (1 counter in __0_0.distcp)")


def test_many_different_step_counts_are_one_short_finding(tmp_path: Path) -> None:
    (found,) = verify(with_steps(tmp_path / "many", {f"layer{index}": torch.tensor(float(index)) for index in range(9)})).findings
    assert found.what.endswith("2 (1 counter in __0_0.distcp) and 6 more values")


def test_counters_of_two_optimizers_may_differ_and_none_is_read_without_the_data(tmp_path: Path) -> None:
    state = {
        name: {"state": {"w": {"step": torch.tensor(count), "exp_avg": torch.ones(2)}}, "param_groups": [{"params": ["w"]}]}
        for name, count in (("generator", 4.0), ("critic", 20.0))
    }
    dcp.save({"model": {"w": torch.zeros(2)}, "optimizers": state}, checkpoint_id=tmp_path / "two", no_dist=True)
    assert verify(tmp_path / "two").findings == []
    uneven = with_steps(tmp_path / "uneven", {"a": torch.tensor(4.0), "b": torch.tensor(2.0)})
    assert verify(uneven, data=False).findings == []


def test_an_unpublished_step_is_an_error(store: Path) -> None:
    (store / "manifest.json").unlink()
    assert codes(verify(store)) == {"unpublished"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64])
def test_nan_and_inf_are_found_where_asked(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.save({"a": torch.tensor([1.0, float("nan"), float("inf")]).to(dtype), "b": torch.ones(2)}, tmp_path / "x.pt")
    assert verify(tmp_path / "x.pt").findings == []
    report = verify(tmp_path / "x.pt", finite=True)
    assert [(finding.code, finding.where) for finding in report.findings] == [("not-finite", "a")]
    assert "1 NaN and 1 inf among 3" in report.findings[0].what


def test_moments_that_share_their_bits_are_found(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = optimizer.state_dict()
    shared = state["state"][0]["exp_avg"]
    state["state"][0]["exp_avg_sq"] = shared
    torch.save({"model": model.state_dict(), "optim": state}, tmp_path / "x.pt")
    report = verify(tmp_path / "x.pt")
    assert "shared-moments" in codes(report)
    assert "numbered-state" in codes(report)


def test_a_model_is_compared_in_both_directions(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Net()
    other.third = nn.Linear(1, 1)
    del other.second
    other.first = nn.Linear(4, 5)
    report = verify(store, model=other)
    by_code = {code: sorted(finding.where for finding in report.findings if finding.code == code) for code in codes(report)}
    assert by_code["missing-key"] == ["third.bias", "third.weight"]
    assert by_code["unexpected-key"] == ["second.bias", "second.weight"]
    assert by_code["wrong-shape"] == ["first.bias", "first.weight"]
    assert by_code["no-state"] == ["optimizer.state.third.bias", "optimizer.state.third.weight"]
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert verify(store, model="test_checkpoint_verify:build").findings == []
    for spec in ("nowhere:build", "test_checkpoint_verify:nothing", "nonsense", "os:getcwd"):
        with pytest.raises(CheckpointError, match=spec.split(":", maxsplit=1)[0]):
            verify(store, model=spec)


def wrapped(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {prefix + name: value for name, value in state.items()}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_an_optimizer_s_names_may_carry_wrappers_and_the_wrappers_are_told(tmp_path: Path, prefix: str) -> None:
    model, optimizer = trained()
    state = checkpoint.optimizer_state(optimizer, {("model",): model})
    groups = [{**group, "params": [prefix + name for name in group["params"]]} for group in state["param_groups"]]
    saved = {"state": wrapped(state["state"], prefix), "param_groups": groups}
    torch.save({"model": wrapped(model.state_dict(), prefix), "optim": saved}, tmp_path / "full.pt")
    found = verify(tmp_path / "full.pt", model=build)
    assert found.ok, [finding.line() for finding in found.findings]
    assert {finding.code for finding in found.findings} == {"wrapped-name"}
    assert all(any(repr(part) in finding.what for finding in found.findings) for part in prefix.split(".")[:-1])


def test_flat_parameters_are_one_finding_that_says_to_migrate(tmp_path: Path, store: Path) -> None:
    (tmp_path / "local").mkdir()
    for rank in range(2):
        torch.save({"_flat_param": torch.zeros(22)}, tmp_path / "local" / f"ckpt_rank_{rank}_of_2.pt")
    for options in ({"model": build}, {"against": store}):
        (finding,) = verify(tmp_path / "local", **options).findings  # type: ignore[arg-type]
        assert finding.code == "flat-parameters"
        assert "labkit checkpoint migrate" in finding.what


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: os.truncate(file, 100)], ids=["missing", "cut"])
def test_one_fault_of_a_file_is_one_finding(store: Path, damage: Callable[[Path], None]) -> None:
    damage(store / "__0_0.distcp")
    found = [finding.code for finding in verify(store, data=False).findings if finding.where.endswith("__0_0.distcp")]
    assert found in (["missing-file"], ["short-file"])


def test_a_plain_pickle_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(pickle.dumps({"a": 1}))
    (finding,) = verify(tmp_path / "x.pt").findings
    assert "a plain pickle" in finding.what


def test_another_checkpoint_is_compared_bit_for_bit(store: Path, tmp_path: Path) -> None:
    model, _ = trained()
    state: dict[str, Any] = {f"module.{name}": value.clone() for name, value in model.state_dict().items()}
    torch.save(state, tmp_path / "model.pt")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert verify(tmp_path / "model.pt", against=tmp_path / "model.safetensors", data=False).ok
    state["module.first.weight"][0, 0] = -0.0 if state["module.first.weight"][0, 0] == 0 else 0.5
    del state["module.second.bias"]
    torch.save(state, tmp_path / "model.pt")
    report = verify(tmp_path / "model.pt", against=tmp_path / "model.safetensors")
    assert {finding.code: finding.where for finding in report.findings if finding.severity == "error"} == {
        "other-bits": "first.weight",
        "unexpected-key": "second.bias",
    }


def test_what_cannot_be_opened_is_one_finding_and_nothing_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"PK nothing")
    assert codes(verify(tmp_path / "x.pt")) == {"unreadable"}
    with pytest.raises(CheckpointNotFoundError):
        verify(tmp_path / "absent")


def test_the_report_is_plain_data(plain: Path) -> None:
    flip_payload(plain, "model.first.bias")
    told = json.loads(json.dumps(verify(plain).as_dict()))
    assert told["ok"] is False
    assert told["findings"][0]["severity"] == "error"


@pytest.fixture
def four_files(tmp_path: Path) -> Path:
    """A DCP directory as written by four ranks."""
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": checkpoint.optimizer_state(optimizer, {("model",): model}), "epoch": 3}
    torch.save(state, tmp_path / "x.pt")
    checkpoint.reshard(tmp_path / "x.pt", tmp_path / "four", 4)
    (tmp_path / "four" / "manifest.json").unlink()
    return tmp_path / "four"


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize(
    "damage", [lambda file: file.unlink(), lambda file: os.truncate(file, 100), zero], ids=["missing", "cut", "zeroed"]
)
@pytest.mark.parametrize("file", ["__0_0.distcp", "__2_0.distcp"], ids=["with values", "without values"])
def test_one_broken_file_of_four_is_one_finding_that_says_what_it_held(
    four_files: Path, tmp_path: Path, damage: Callable[[Path], None], file: str
) -> None:
    held = [entry for entry in checkpoint.open_checkpoint(four_files).tensors.values() if file in entry.chunks.file_names()]
    chunks = [(entry, chunk) for entry in held for chunk in entry.chunks if chunk.file == file]
    size = sum(chunk.numel * entry.dtype.itemsize for entry, chunk in chunks)
    damage(four_files / file)
    (finding,) = verify(four_files).findings
    assert finding.where == str(four_files / file)
    assert f"{len(held)} tensors" in finding.what
    assert f"{size} B" in finding.what
    assert f"({held[0].key}, {held[1].key}, {held[2].key} and {len(held) - 3} more)" in finding.what
    findings = verify(tmp_path / "x.pt", against=four_files).findings
    assert [finding.where for finding in findings] == [str(four_files / file)]


def test_show_tells_a_missing_file_and_what_it_held(four_files: Path) -> None:
    (four_files / "__2_0.distcp").unlink()
    shown = CliRunner().invoke(command, ["show", str(four_files)]).output
    assert "missing: __2_0.distcp, which held 6 tensors or parts of them" in shown
    (missing,) = json.loads(CliRunner().invoke(command, ["show", str(four_files), "--json"]).output)["missing"]
    assert (missing["file"], missing["num_tensors"], missing["num_values"]) == ("__2_0.distcp", 6, 0)
    assert missing["first"][0] == "model.first.weight"


def test_every_job_is_done_once_whatever_the_number_of_threads(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "x.pt")
    source = checkpoint.open_checkpoint(tmp_path / "x.pt")
    for workers in (1, 2, 5):
        done: list[int] = []
        each(iter(range(1000)), lambda job, _, done=done: done.append(job), source, workers)  # type: ignore[misc]
        assert sorted(done) == list(range(1000))


def test_a_job_that_raises_ends_the_others_and_its_error_arrives(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "x.pt")
    done: list[int] = []

    def work(job: int, _: object) -> None:
        done.append(job)
        if job == 10:
            raise CheckpointError("the tenth")

    with pytest.raises(CheckpointError, match="the tenth"):
        each(range(10**9), work, checkpoint.open_checkpoint(tmp_path / "x.pt"), 2)
    assert len(done) < 10**9


def test_a_command_leaves_the_collector_as_it_was(tmp_path: Path) -> None:
    before = gc.get_threshold()
    assert CliRunner().invoke(command, ["show", str(tmp_path / "missing")]).exit_code == 1
    assert gc.get_threshold() == before
