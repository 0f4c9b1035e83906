"""An error found by verify stops migrate, reshard and load, and ``despite`` lets them continue."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

import labkit.checkpoint
from labkit.checkpoint import load, migrate, optimizer_state, reshard, save, verify
from labkit.checkpoint.checks.findings import CODES, CURED, FINAL, Gate
from labkit.checkpoint.cli import checkpoint as command
from labkit.checkpoint.errors import CheckpointError, UnsafeCheckpointError, VerificationError
from tests.unit.test_checkpoint_verify import edit_metadata, flip_payload

FIRST = "optimizer.state.0.weight"


def trained(amsgrad: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    options: list[dict[str, Any]] = [{"params": model[0].parameters(), "amsgrad": amsgrad}, {"params": model[1].parameters()}]
    optimizer = torch.optim.AdamW(options)
    model(torch.rand(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def state() -> dict[str, Any]:
    model, optimizer = trained()
    return {"model": model.state_dict(), "optimizer": optimizer_state(optimizer, {("model",): model}), "epoch": 3}


def plain(folder: Path, **more: Any) -> Path:
    dcp.save(state() | more, checkpoint_id=folder / "source", no_dist=True)
    return folder / "source"


def published(folder: Path) -> Path:
    """A directory with a manifest."""
    reshard(plain(folder), folder / "published", 2)
    return folder / "published"


def edited(change: Callable[[Metadata], None]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        edit_metadata(plain(folder), change)
        return folder / "source"

    return make


def lose_piece(metadata: Metadata) -> None:
    del metadata.state_dict_metadata[f"{FIRST}.exp_avg"]


def share_bytes(metadata: Metadata) -> None:
    storage = metadata.storage_data
    one, two = (next(at for at in storage if at.fqn == f"{FIRST}.{piece}") for piece in ("exp_avg", "exp_avg_sq"))
    storage[two] = storage[one]


def drop_chunk(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.0.weight"].chunks = []


def double_chunk(metadata: Metadata) -> None:
    described = metadata.state_dict_metadata["model.0.weight"]
    described.chunks = described.chunks * 2


def move_chunk(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.0.weight"].size = torch.Size([5, 4])


def wrong_dtype(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.0.weight"].properties.dtype = torch.float64


def same_moments(folder: Path) -> Path:
    """A state like FSDP1's FULL optimizer state on the CPU."""
    saved = state()
    for pieces in saved["optimizer"]["state"].values():
        pieces["exp_avg"] = pieces["exp_avg_sq"]
    torch.save(saved, folder / "full.pt")
    return folder / "full.pt"


def strange_state(folder: Path) -> Path:
    saved = state()
    saved["optimizer"]["param_groups"][0]["params"].remove("0.weight")
    torch.save(saved, folder / "x.pt")
    return folder / "x.pt"


def swapped_moments(folder: Path) -> Path:
    """Make the state that results when numbers are named in another order."""
    saved = state()
    moments = saved["optimizer"]["state"]
    moments["0.weight"], moments["0.bias"] = moments["0.bias"], moments["0.weight"]
    torch.save(saved, folder / "x.pt")
    return folder / "x.pt"


def damaged_manifest(folder: Path) -> Path:
    file = published(folder) / "manifest.json"
    file.write_text(file.read_text().replace('"size"', '"Size"', 1))
    return file.parent


def longer_file(folder: Path) -> Path:
    with (published(folder) / "__0_0.distcp").open("ab") as file:
        file.write(b"\0")
    return folder / "published"


def unfinished_step(folder: Path) -> Path:
    model, optimizer = trained()
    step = save(folder / "store", {"model": model, "optimizer": optimizer, "epoch": 3}, 1)
    (step / "manifest.json").unlink()
    return step


def changed_weight(folder: Path) -> Path:
    flip_payload(plain(folder), "model.0.weight")
    return folder / "source"


def changed_header(folder: Path) -> Path:
    """The strides of a weight, which keep its shape and dtype."""
    file = plain(folder) / "__0_0.distcp"
    strides, others = b"K\x04K\x01\x86", b"K\x01K\x06\x86"
    data = file.read_bytes()
    assert strides in data
    file.write_bytes(data.replace(strides, others, 1))
    return folder / "source"


def changed_value(folder: Path) -> Path:
    """A bit of a value's pickle, which copying byte for byte does not notice."""
    plain(folder, scheduler={"name": "cosine"})
    file = folder / "source" / "__0_0.distcp"
    file.write_bytes(file.read_bytes().replace(b"cosine", b"cosinf"))
    return folder / "source"


def changed_pickle(folder: Path) -> Path:
    """A bit of a torch.save file's own pickle, which no tensor's checksum covers."""
    torch.save(state() | {"schedule": "cosine"}, folder / "x.pt")
    file = folder / "x.pt"
    file.write_bytes(file.read_bytes().replace(b"cosine", b"cosinf"))
    return file


def changed_safetensors(folder: Path) -> Path:
    migrate(plain(folder), folder / "weights", to="safetensors", only=["model"])
    (file,) = (folder / "weights").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    return folder / "weights"


def without_file(folder: Path) -> Path:
    (published(folder) / "__1_0.distcp").unlink()
    return folder / "published"


def cut_file(folder: Path) -> Path:
    os.truncate(plain(folder) / "__0_0.distcp", 3000)
    return folder / "source"


def without_rank(folder: Path) -> Path:
    for rank in (1, 2):
        (folder / "files").mkdir(exist_ok=True)
        torch.save(state() | {"rng": torch.tensor([rank] * 16, dtype=torch.uint8)}, folder / f"files/state_{rank}.pt")
    return folder / "files"


def quantized(folder: Path) -> Path:
    torch.save(state() | {"small": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)}, folder / "x.pt")
    return folder / "x.pt"


ACCEPTABLE = [
    ("bad-manifest", damaged_manifest),
    ("changed-content", changed_weight),
    ("changed-content", changed_header),
    ("changed-content", changed_value),
    ("changed-content", changed_pickle),
    ("changed-content", changed_safetensors),
    ("changed-size", longer_file),
    ("misshapen-state", swapped_moments),
    ("missing-rank", without_rank),
    ("partial-state", edited(lose_piece)),
    ("shared-bytes", edited(share_bytes)),
    ("shared-moments", same_moments),
    ("stranger-state", strange_state),
    ("unpublished", unfinished_step),
]


def tensor_parallel_rank(root: Path) -> Path:
    torch.save({"model": {"w": torch.ones(2, 2)}, "tensor_model_parallel_size": 2}, root / "mp_rank_00.pt")
    return root / "mp_rank_00.pt"


NOT_ACCEPTABLE = [
    ("missing-file", without_file),
    ("outside", edited(move_chunk)),
    ("overlapping", edited(double_chunk)),
    ("short-file", cut_file),
    ("trainer-shards", tensor_parallel_rank),
    ("uncovered", edited(drop_chunk)),
    ("unreadable", edited(wrong_dtype)),
    ("unsupported", quantized),
]
WARNINGS = {"late-file", "numbered-state", "stray-file", "tied", "uneven-state", "uneven-steps", "wrapped-name", "other-dtype"}
ASKED_FOR = {"flat-parameters", "missing-key", "no-state", "not-finite", "other-bits", "unexpected-key", "untied", "wrong-shape"}
OWN_FLAG = {"copies-differ"}


def names_of(cases: list[tuple[str, Any]]) -> list[str]:
    return [f"{code}-{make.__name__}" for code, make in cases]


def to_dcp(source: Path, out: Path, **options: Any) -> Any:
    return migrate(source, out, **options)


def to_two_ranks(source: Path, out: Path, **options: Any) -> Any:
    return reshard(source, out, 2, **options)


def accepted_of(source: Path) -> list[str]:
    return sorted({finding.code for finding in verify(source).findings if finding.severity == "error"} - CURED)


@pytest.mark.parametrize("work", [to_dcp, to_two_ranks])
@pytest.mark.parametrize(("code", "make"), ACCEPTABLE, ids=names_of(ACCEPTABLE))
def test_p2_each_error_of_verify_stops_a_copy_and_despite_goes_on(
    tmp_path: Path, code: str, make: Callable[[Path], Path], work: Callable[..., Any]
) -> None:
    source, out = make(tmp_path), tmp_path / "out"
    codes = accepted_of(source)
    assert code in codes
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        work(source, out)
    assert sorted(os.listdir(tmp_path)) == before
    assert f"--despite {code}" in str(caught.value)
    if isinstance(caught.value, VerificationError):
        assert code in caught.value.codes
        assert all(problem.startswith("error: ") for problem in caught.value.problems)
    result = work(source, out, despite=codes)
    assert {finding.code for finding in result.accepted} <= set(codes)
    assert code in {finding.code for finding in result.accepted}
    assert {finding.code for finding in verify(out).findings if finding.severity == "error"} <= set(codes)


@pytest.mark.parametrize("work", [to_dcp, to_two_ranks])
@pytest.mark.parametrize(("code", "make"), NOT_ACCEPTABLE, ids=names_of(NOT_ACCEPTABLE))
def test_p2_what_is_not_there_stops_a_copy_and_nobody_can_accept_it(
    tmp_path: Path, code: str, make: Callable[[Path], Path], work: Callable[..., Any]
) -> None:
    source, out = make(tmp_path), tmp_path / "out"
    assert code in accepted_of(source)
    for despite in ((), (code,)):
        with pytest.raises(CheckpointError) as caught:
            work(source, out, despite=despite)
        assert not despite or "cannot be accepted" in str(caught.value)
    assert not out.exists()


def test_every_code_is_tried_or_is_no_error_of_a_checkpoint_alone() -> None:
    tried = {code for code, _ in ACCEPTABLE + NOT_ACCEPTABLE} | {"unsafe"}
    assert {code for code, _ in NOT_ACCEPTABLE} == FINAL
    assert tried | WARNINGS | ASKED_FOR | OWN_FLAG | CURED == CODES.keys()


def test_every_code_that_a_check_reports_is_in_the_table() -> None:
    reported = set()
    for file in Path(labkit.checkpoint.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("error", "warning"):
                reported |= {part.value for part in node.args[:1] if isinstance(part, ast.Constant)}
    assert "missing-file" in reported
    assert reported <= CODES.keys()
    shown = CliRunner().invoke(command, ["verify", "--help"]).output
    assert all(f"    {code} " in shown for code in CODES)


def test_an_unknown_code_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    source = plain(tmp_path)
    tries: list[Callable[..., Any]] = [
        lambda **options: migrate(source, tmp_path / "out", **options),
        lambda **options: reshard(source, tmp_path / "out", 2, **options),
        lambda **options: load(source, {"epoch": 0}, **options),
    ]
    for attempt in tries:
        with pytest.raises(CheckpointError, match=r"despite='shared-moment'.*partial-state, .*shared-moments"):
            attempt(despite=["shared-moment"])
    assert not (tmp_path / "out").exists()


def test_p2_the_last_line_says_what_was_accepted_and_does_not_say_verified_alone(tmp_path: Path) -> None:
    source = same_moments(tmp_path)
    runner = CliRunner()
    refused = runner.invoke(command, ["migrate", str(source), str(tmp_path / "out")])
    assert refused.exit_code == 1
    findings = [line for line in refused.output.splitlines() if "[shared-moments]" in line and "error: " in line]
    assert len(findings) == 4
    assert "--despite shared-moments" in refused.output
    done = runner.invoke(command, ["migrate", str(source), str(tmp_path / "out"), "--despite", "shared-moments"])
    assert done.exit_code == 0
    assert done.output.splitlines()[-1].endswith("verified, despite 4 findings that you accepted (shared-moments)")
    assert done.output.count("note: accepted: error: optimizer.state.") == 4


def test_a_fault_in_what_is_left_out_stops_nothing(tmp_path: Path) -> None:
    source = same_moments(tmp_path)
    assert verify(source).ok is False
    for name, options in {"weights.safetensors": {"only": ["model"]}, "model": {"drop": ["optimizer.*"]}}.items():
        result = migrate(source, tmp_path / name, **options)  # type: ignore[arg-type]
        assert result.accepted == ()
        assert verify(tmp_path / name).ok


def test_what_would_come_out_is_checked_before_it_appears(tmp_path: Path) -> None:
    source, out = plain(tmp_path), tmp_path / "out"
    with pytest.raises(VerificationError, match=r"(?s)out was not made.*--despite partial-state") as caught:
        migrate(source, out, drop=[f"{FIRST}.exp_avg"])
    assert caught.value.codes == ("partial-state",)
    assert os.listdir(tmp_path) == ["source"]
    assert migrate(source, out, drop=[f"{FIRST}.exp_avg"], despite=["partial-state"]).accepted[0].code == "partial-state"


def test_what_torch_would_run_stops_every_operation(tmp_path: Path) -> None:
    hostile = tmp_path / "hostile"
    dcp.save(state() | {"hook": print}, checkpoint_id=hostile, no_dist=True)
    assert {finding.code for finding in verify(hostile).findings} == {"unsafe"}
    with pytest.raises(CheckpointError, match=r"hook: .*builtins\.print.*--drop"):
        migrate(hostile, tmp_path / "out")
    with pytest.raises(VerificationError, match=r"builtins\.print.*\[unsafe\]"):
        reshard(hostile, tmp_path / "out", 2)
    with pytest.raises(UnsafeCheckpointError, match=r"builtins\.print"):
        load(hostile, state() | {"hook": None})
    assert not (tmp_path / "out").exists()
    assert migrate(hostile, tmp_path / "out", drop=["hook"]).accepted == ()
    with pytest.raises(CheckpointError, match=r"builtins\.print"):  # what would run is never copied, whatever is accepted
        reshard(hostile, tmp_path / "two", 2, despite=["unsafe"])


def test_an_unsafe_file_says_how_to_go_on_and_its_opaque_part_can_be_left_out(tmp_path: Path) -> None:
    torch.save(state() | {"hook": print}, tmp_path / "x.pt")
    with pytest.raises(UnsafeCheckpointError, match=r"builtins\.print.*--despite unsafe"):
        migrate(tmp_path / "x.pt", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"hook.*--drop"):
        migrate(tmp_path / "x.pt", tmp_path / "out", despite=["unsafe"])
    result = migrate(tmp_path / "x.pt", tmp_path / "out", despite=["unsafe"], drop=["hook"])
    assert [finding.code for finding in result.accepted] == ["unsafe"]
    assert verify(tmp_path / "out").ok


def test_p2_load_refuses_equal_moments_before_it_changes_anything(tmp_path: Path) -> None:
    migrate(same_moments(tmp_path), tmp_path / "new", despite=["shared-moments"])
    model, optimizer = trained()
    with torch.no_grad():
        model[0].weight.zero_()
    target = {"model": model, "optimizer": optimizer, "epoch": 0}
    with pytest.raises(VerificationError, match=r"Nothing was loaded.*despite=\['shared-moments'\]"):
        load(tmp_path / "new", target)
    assert not model[0].weight.any()
    assert target["epoch"] == 0
    report = load(tmp_path / "new", target, despite=["shared-moments"])
    assert len([note for note in report.notes if note.startswith("accepted: error: optimizer.state.")]) == 4
    assert model[0].weight.any()
    load(tmp_path / "new", target, check="none")


def test_p2_load_does_not_mind_a_fault_in_what_it_leaves(tmp_path: Path) -> None:
    migrate(same_moments(tmp_path), tmp_path / "new", despite=["shared-moments"])
    model, _ = trained()
    assert load(tmp_path / "new", {"model": model}, ignore=["optimizer.*", "epoch"]).notes == ()


def test_an_unfinished_step_is_not_loaded_by_its_own_path(tmp_path: Path) -> None:
    model, optimizer = trained()
    with pytest.raises(VerificationError, match="unpublished"):
        load(unfinished_step(tmp_path), {"model": model, "optimizer": optimizer, "epoch": 0})


def test_state_that_differs_by_options_or_shape_is_no_error(tmp_path: Path) -> None:
    model, optimizer = trained(amsgrad=True)
    save(tmp_path / "amsgrad", {"model": model, "optimizer": optimizer}, 1)
    report = verify(tmp_path / "amsgrad")
    assert {(finding.code, finding.severity) for finding in report.findings} == {("uneven-state", "warning")}
    load(tmp_path / "amsgrad", {"model": model, "optimizer": optimizer})
    model, _ = trained()
    factored = torch.optim.Adafactor(model.parameters())
    model(torch.rand(3, 4)).sum().backward()
    factored.step()
    save(tmp_path / "factored", {"model": model, "optimizer": factored}, 1)
    assert verify(tmp_path / "factored").findings == []
    load(tmp_path / "factored", {"model": model, "optimizer": factored})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Adadelta", {}),
        ("Adagrad", {}),
        ("Adam", {"amsgrad": True}),
        ("Adamax", {}),
        ("ASGD", {}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("RMSprop", {"centered": True, "momentum": 0.5}),
        ("Rprop", {}),
        ("SGD", {"momentum": 0.5}),
    ],
)
def test_what_save_has_written_of_any_optimizer_is_loaded(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    model, _ = trained()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
    for _ in range(2):
        model(torch.rand(3, 4)).pow(2).sum().backward()
        optimizer.step()
    save(tmp_path / "store", {"model": model, "optimizer": optimizer}, 1)
    assert verify(tmp_path / "store").findings == []
    assert load(tmp_path / "store", {"model": model, "optimizer": optimizer}).notes == ()


@pytest.mark.parametrize("lost", ["step", "row_var", "col_var"])
def test_state_that_lacks_what_belongs_to_the_rest_of_it_is_an_error(tmp_path: Path, lost: str) -> None:
    model, _ = trained()
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.rand(3, 4)).sum().backward()
    optimizer.step()
    saved = optimizer_state(optimizer, {("model",): model})
    del saved["state"]["0.weight"][lost]
    torch.save({"model": model.state_dict(), "optimizer": saved}, tmp_path / "x.pt")
    (found,) = verify(tmp_path / "x.pt").findings
    assert (found.code, found.where, found.what) == ("partial-state", FIRST, f"it lacks {lost}, which others have")


def test_the_errors_survive_the_way_between_processes(tmp_path: Path) -> None:
    import pickle

    with pytest.raises(VerificationError) as caught:
        migrate(same_moments(tmp_path), tmp_path / "out")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.codes, copy.problems, str(copy)) == (caught.value.codes, caught.value.problems, str(caught.value))
    gate = pickle.loads(pickle.dumps(Gate.of("x", ["unsafe"])))
    assert gate == Gate.of("x", ["unsafe"])
    assert json.dumps(sorted(gate.despite)) == '["unsafe"]'
