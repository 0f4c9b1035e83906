"""A DCP index that another version of torch, or of Python, wrote, read by labkit, torch and verify."""

from __future__ import annotations

import copyreg
import io
import json
import pathlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint import metadata as classes
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from labkit.checkpoint import load, migrate, open_checkpoint, reshard, verify
from labkit.checkpoint.cli import checkpoint as command
from labkit.checkpoint.errors import CheckpointError

OWN_FIELDS = len(TensorProperties(dtype=torch.float32).__getstate__())  # type: ignore[no-untyped-call]
OWN_READER = "torch >= 2.15" if OWN_FIELDS > 5 else "torch >= 2.3"

WITHOUT_A_REASON = "metadata is None$"  # all that torch 2.11 says of an index that it cannot read


def strides_of(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def as_torch_2_15(metadata: Metadata) -> bytes:
    """The bytes that torch 2.15 pickles: its properties' state ends with the tensor's strides."""
    strides = {
        id(item.properties): strides_of(item.size) for item in metadata.state_dict_metadata.values() if hasattr(item, "size")
    }

    def reduce(properties: TensorProperties) -> Any:
        state = properties.__getstate__()[:5]  # type: ignore[no-untyped-call]
        return copyreg.__newobj__, (TensorProperties,), (*state, strides[id(properties)])  # type: ignore[attr-defined]

    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: reduce}
    pickler.dump(metadata)
    return file.getvalue()


def state() -> dict[str, Any]:
    return {"model": {"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.ones(3)}, "epoch": 3}


def rewritten(folder: Path, write: Callable[[Metadata], bytes]) -> Path:
    dcp.save(state(), checkpoint_id=folder, no_dist=True)
    file = folder / ".metadata"
    file.write_bytes(write(pickle.loads(file.read_bytes())))
    return folder


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    return rewritten(tmp_path / "newer", as_torch_2_15)


def loaded_by_torch(path: Path) -> dict[str, Any]:
    target = {"model": {"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}, "epoch": 0}
    dcp.load(target, checkpoint_id=path, no_dist=True)
    return target


def fields_in(path: Path) -> set[int]:
    return {*open_checkpoint(path).metadata["property_fields"]}


@pytest.mark.skipif(OWN_FIELDS > 5, reason="torch 2.15 and newer read what torch 2.15 writes")
def test_the_torch_here_cannot_read_it_and_verify_says_so_with_the_way_out(newer: Path) -> None:
    # dcp.load's own errors are not Exceptions.
    with pytest.raises(BaseException, match=f"too many values to unpack|{WITHOUT_A_REASON}"):
        loaded_by_torch(newer)
    (found,) = verify(newer).findings
    assert (found.code, found.severity, found.where) == ("newer-torch", "error", str(newer / ".metadata"))
    assert "6 fields" in found.what
    assert "too many values to unpack (expected 5)" in found.what
    assert "torch >= 2.15" in found.what
    assert "labkit checkpoint reshard" in found.what
    assert CliRunner().invoke(command, ["verify", str(newer)]).exit_code == 1


def test_show_says_which_torch_reads_it(newer: Path, tmp_path: Path) -> None:
    assert "its index is read by torch >= 2.15" in CliRunner().invoke(command, ["show", str(newer)]).output
    told = json.loads(CliRunner().invoke(command, ["show", "--json", str(newer)]).output)["metadata"]
    assert (told["property_fields"], told["read_by"]) == ([6], "torch >= 2.15")
    dcp.save(state(), checkpoint_id=tmp_path / "own", no_dist=True)
    told = json.loads(CliRunner().invoke(command, ["show", "--json", str(tmp_path / "own")]).output)["metadata"]
    assert (told["property_fields"], told["read_by"]) == ([OWN_FIELDS], OWN_READER)
    # What every torch reads needs no line.
    assert ("read by" in CliRunner().invoke(command, ["show", str(tmp_path / "own")]).output) == (OWN_FIELDS > 5)


@pytest.mark.parametrize("work", [migrate, lambda source, out: reshard(source, out, 2)], ids=["migrate", "reshard"])
def test_a_copy_is_for_the_torch_here(newer: Path, tmp_path: Path, work: Callable[..., Any]) -> None:
    result = work(newer, tmp_path / "out")
    assert result.accepted == ()
    assert verify(tmp_path / "out").findings == []
    assert fields_in(tmp_path / "out") == {OWN_FIELDS}
    found = loaded_by_torch(tmp_path / "out")
    assert torch.equal(found["model"]["weight"], state()["model"]["weight"])
    assert found["epoch"] == 3


def test_labkit_loads_it_as_it_is(newer: Path) -> None:
    target = {"model": {"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}, "epoch": 0}
    load(newer, target)
    assert torch.equal(target["model"]["weight"], state()["model"]["weight"])  # type: ignore[index]


@pytest.mark.parametrize(("version", "fields"), [("2.3", 5), ("2.13", 5), ("2.14.1+cpu", 5), ("2.15", 6), ("3.0", 6)])
def test_an_index_can_be_written_for_another_torch(newer: Path, tmp_path: Path, version: str, fields: int) -> None:
    options = ["--for-torch", version]
    for out, arguments in {"migrated": ["migrate"], "resharded": ["reshard", "--ranks", "2"]}.items():
        done = CliRunner().invoke(command, [*arguments, str(newer), str(tmp_path / out), *options])
        assert done.exit_code == 0, done.output
        assert fields_in(tmp_path / out) == {fields}
        codes = {finding.code for finding in verify(tmp_path / out).findings}
        assert codes == ({"newer-torch"} if fields > OWN_FIELDS else set())
        assert ("cannot read it" in done.output) == (fields > OWN_FIELDS)


@pytest.mark.parametrize("version", ["2.2", "1.13.1", "", "2", "newest", "v2.13"])
def test_what_is_no_version_or_too_old_is_refused(newer: Path, tmp_path: Path, version: str) -> None:
    with pytest.raises(CheckpointError, match="for_torch"):
        migrate(newer, tmp_path / "out", for_torch=version)
    with pytest.raises(CheckpointError, match="for_torch"):
        migrate(newer, tmp_path / "out.pt", for_torch="2.13")
    assert not (tmp_path / "out").exists()


def test_under_torch_2_15_an_index_is_written_for_it_and_for_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newer: Path
) -> None:
    dcp.save(state(), checkpoint_id=tmp_path / "older", no_dist=True)
    get, set_ = TensorProperties.__getstate__, TensorProperties.__setstate__

    def set_2_15(self: TensorProperties, pickled: tuple[Any, ...]) -> None:
        *rest, self.strides = pickled if len(pickled) == 6 else (*pickled, None)  # type: ignore[attr-defined]
        set_(self, tuple(rest))

    if OWN_FIELDS == 5:  # an older torch plays torch 2.15
        monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*get(self), getattr(self, "strides", None)))
        monkeypatch.setattr(TensorProperties, "__setstate__", set_2_15)
    for source in (newer, tmp_path / "older"):
        assert verify(source).findings == []
        migrate(source, tmp_path / f"{source.name} own")
        migrate(source, tmp_path / f"{source.name} for 2.13", for_torch="2.13")
        assert fields_in(tmp_path / f"{source.name} own") == {6}
        assert fields_in(tmp_path / f"{source.name} for 2.13") == {5}
    monkeypatch.undo()
    for name in ("newer for 2.13", "older for 2.13"):
        assert loaded_by_torch(tmp_path / name)["epoch"] == 3
        assert verify(tmp_path / name).findings == []


@pytest.mark.parametrize("change", [lambda state: (*state, None, None), dict, lambda state: state[:4]], ids=["7", "dict", "4"])
def test_properties_of_an_unknown_form_are_for_no_known_torch(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    def write(metadata: Metadata) -> bytes:
        def reduce(properties: TensorProperties) -> Any:
            own = properties.__getstate__()  # type: ignore[no-untyped-call]
            return copyreg.__newobj__, (TensorProperties,), change(own) if change is not dict else {"dtype": own[0]}  # type: ignore[attr-defined]

        file = io.BytesIO()
        pickler = pickle.Pickler(file)
        pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: reduce}
        pickler.dump(metadata)
        return file.getvalue()

    source = rewritten(tmp_path / "source", write)
    with pytest.raises(BaseException, match=f"unpack|{WITHOUT_A_REASON}"):
        loaded_by_torch(source)
    (found,) = verify(source).findings
    assert found.code == "newer-torch"
    assert "no torch that labkit knows, the newest of which is 2.15" in found.what
    migrate(source, tmp_path / "out")
    assert loaded_by_torch(tmp_path / "out")["epoch"] == 3


@pytest.mark.parametrize(
    "name",
    [
        "WindowsPath",
        # In Python 3.13 alone the class is in the module that the index names.
        pytest.param("PosixPath", marks=pytest.mark.skipif(sys.version_info[:2] == (3, 13), reason="Python 3.13 reads it")),
    ],
)
def test_an_index_with_a_path_that_the_python_here_cannot_make_is_an_error_that_a_copy_mends(tmp_path: Path, name: str) -> None:
    class Foreign:
        def __reduce__(self) -> Any:
            return getattr(pathlib, name), ("runs", "1")

    def write(metadata: Metadata) -> bytes:
        assert metadata.storage_meta is not None
        metadata.storage_meta.checkpoint_id = Foreign()  # type: ignore[assignment]
        return pickle.dumps(metadata, protocol=2)

    source = rewritten(tmp_path / "source", write)
    if name == "PosixPath":  # as Python 3.13 names it
        (source / ".metadata").write_bytes((source / ".metadata").read_bytes().replace(b"cpathlib\n", b"cpathlib._local\n"))
    with pytest.raises(BaseException, match=rf"WindowsPath|pathlib\._local|{WITHOUT_A_REASON}"):
        loaded_by_torch(source)
    (found,) = verify(source).findings
    assert (found.code, name in found.what) == ("newer-python", True)
    assert migrate(source, tmp_path / "out").accepted == ()
    assert verify(tmp_path / "out").findings == []
    assert loaded_by_torch(tmp_path / "out")["epoch"] == 3


def test_a_class_that_the_torch_here_lacks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class TensorPropertiesV2(TensorProperties):
        pass

    TensorPropertiesV2.__module__, TensorPropertiesV2.__qualname__ = classes.__name__, "TensorPropertiesV2"

    def write(metadata: Metadata) -> bytes:
        with monkeypatch.context() as patch:
            patch.setattr(classes, "TensorPropertiesV2", TensorPropertiesV2, raising=False)
            for described in metadata.state_dict_metadata.values():
                if hasattr(described, "properties"):
                    described.properties.__class__ = TensorPropertiesV2
            return pickle.dumps(metadata)

    found, unsafe = verify(rewritten(tmp_path / "source", write)).findings
    assert (found.code, unsafe.code) == ("newer-torch", "unsafe")
    assert "TensorPropertiesV2" in found.what
