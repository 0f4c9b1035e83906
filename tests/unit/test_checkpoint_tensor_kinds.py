"""Tensors that are more than bytes in C order: lazy bits, expanded views, and kinds that labkit names but does not read."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.masked import masked_tensor

from labkit.checkpoint import Reader, load, migrate, open_checkpoint, reshard, verify
from labkit.checkpoint.data.read import same_bits
from labkit.checkpoint.errors import CheckpointFormatError, CheckpointMismatchError, UnsupportedTensorError
from labkit.checkpoint.views.describe import describe
from tests.unit.hostile_pickles import assemble, call, line_name, storage, text, torch_file

COMPLEX = torch.tensor([[1 + 2j, 3 - 1j], [0.5j, 2]])
REAL = torch.arange(6.0).reshape(2, 3)


def lazy_state() -> dict[str, torch.Tensor]:
    return {
        "base": COMPLEX,
        "conjugate": COMPLEX.conj(),
        "transposed": COMPLEX.t().conj(),
        "part": COMPLEX.conj()[1:],
        "adjoint": COMPLEX.clone().mH,
        "negative": torch._neg_view(REAL),
        "imaginary": COMPLEX.clone().conj().imag,
        "both": torch._neg_view(COMPLEX.clone().conj()),
        "parameter": torch.nn.Parameter(COMPLEX.clone().conj()),
        "scalar": torch._neg_view(torch.tensor(3.0)),
        "empty": torch._neg_view(torch.ones(0)),
    }


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


@pytest.mark.parametrize("kind", ["x.pt", "dcp"])
def test_g_lazy_bits_are_resolved_when_a_tensor_is_read(tmp_path: Path, kind: str) -> None:
    state = lazy_state()
    torch.save(state, tmp_path / "x.pt")
    dcp.save(dict(state), checkpoint_id=tmp_path / "dcp", no_dist=True)
    checkpoint = open_checkpoint(tmp_path / kind)
    with Reader(checkpoint, checksums=True) as reader:
        for key, tensor in state.items():
            assert same_bits(reader.tensor(key), resolved(tensor)), key
        assert same_bits(reader.box(checkpoint.tensors["negative"], (1, 1), (1, 2)), resolved(state["negative"])[1:, 1:])
    assert verify(tmp_path / kind).ok


@pytest.mark.parametrize("source", ["x.pt", "dcp"])
@pytest.mark.parametrize("destination", ["new", "new.pt", "new.safetensors"])
def test_g_lazy_bits_are_resolved_in_every_format(tmp_path: Path, source: str, destination: str) -> None:
    state = lazy_state()
    torch.save(state, tmp_path / "x.pt")
    dcp.save(dict(state), checkpoint_id=tmp_path / "dcp", no_dist=True)
    migrate(tmp_path / source, tmp_path / destination)
    with Reader(open_checkpoint(tmp_path / destination)) as reader:
        for key, tensor in state.items():
            assert same_bits(reader.tensor(key), resolved(tensor)), key
    torch.save({key: resolved(tensor) for key, tensor in state.items()}, tmp_path / "true.pt")
    assert verify(tmp_path / source, against=tmp_path / "true.pt").ok
    assert verify(tmp_path / destination, against=tmp_path / source).ok


def test_g_equal_bytes_of_different_values_are_different(tmp_path: Path) -> None:
    torch.save({"w": COMPLEX}, tmp_path / "a.pt")
    torch.save({"w": COMPLEX.conj()}, tmp_path / "b.pt")
    report = verify(tmp_path / "a.pt", against=tmp_path / "b.pt")
    assert [finding.code for finding in report.findings] == ["other-bits"]


def test_g_a_tensor_and_its_conjugate_in_one_storage_are_not_tied(tmp_path: Path) -> None:
    torch.save({"w": COMPLEX, "conjugate": COMPLEX.conj(), "again": COMPLEX.conj()}, tmp_path / "x.pt")
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    assert {key: entry.tied_to for key, entry in checkpoint.tensors.items()} == {"w": None, "conjugate": None, "again": "conjugate"}


def test_g_lazy_bits_are_resolved_on_load(tmp_path: Path) -> None:
    torch.save({"w": COMPLEX.conj(), "list": [COMPLEX.clone().conj(), 1]}, tmp_path / "x.pt")
    state: dict[str, Any] = {"w": torch.zeros(2, 2, dtype=torch.complex64), "list": [torch.zeros(2, 2, dtype=torch.complex64), 0]}
    load(tmp_path / "x.pt", state)
    assert same_bits(state["w"], resolved(COMPLEX.conj()))
    assert same_bits(state["list"][0], resolved(COMPLEX.conj()))


def test_g_flags_that_are_not_known_are_not_supported(tmp_path: Path) -> None:
    arguments = (storage(), b"K\0", b"K\x01\x85", b"K\x01\x85", b"\x89", b"}", b"}" + text("fold") + b"\x88s")
    tensor = call(line_name("torch._utils", "_rebuild_tensor_v2"), *arguments)
    path = torch_file(tmp_path / "x.pt", assemble(b"}" + text("w") + tensor + b"s"))
    assert not open_checkpoint(path).tensors
    assert [finding.code for finding in verify(path).findings] == ["unsupported"]


def unread_state() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "quantized": torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8),
            "channels": torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint8),
            "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "sparse": torch.eye(3).to_sparse(),
            "compressed": torch.eye(3).to_sparse_csr(),
            "meta": torch.ones(2, device="meta"),
            "subclass": masked_tensor(torch.ones(2), torch.tensor([True, False])),
        }


WORDS = {
    "quantized": "quantized tensor 2x3 qint8",
    "channels": "quantized tensor 2x2 quint8",
    "jagged": "jagged tensor",
    "nested": "nested tensor",
    "sparse": "sparse tensor 3x3 (sparse_coo)",
    "compressed": "sparse tensor 3x3 (sparse_csr)",
    "meta": "meta tensor 2 float32",
    "subclass": "tensor subclass torch.masked",
}


@pytest.mark.parametrize("name", WORDS)
def test_a_tensor_that_is_not_read_is_named_and_the_rest_is_there(tmp_path: Path, name: str) -> None:
    source = tmp_path / "x.pt"
    torch.save({"model": {"weight": torch.ones(2), name: unread_state()[name]}}, source)
    checkpoint = open_checkpoint(source)
    assert list(checkpoint.tensors) == ["model.weight"]
    (shown,) = describe(checkpoint)["values"]
    assert shown["unsupported"].startswith(WORDS[name])
    assert json.dumps(shown)
    (finding,) = verify(source).findings
    assert (finding.code, finding.severity, finding.where) == ("unsupported", "error", f"model.{name}")
    assert verify(source, data=False).findings == [finding]
    with Reader(checkpoint) as reader, pytest.raises(UnsupportedTensorError, match=f"not supported: model.{name}: "):
        reader.value(f"model.{name}")
    for destination in ("new", "new.pt", "new.safetensors"):
        with pytest.raises(UnsupportedTensorError, match=f"not supported: model.{name} .*--drop"):
            migrate(source, tmp_path / destination)
        assert not (tmp_path / destination).exists()
        migrate(source, tmp_path / destination, drop=[f"model.{name}"])
        assert verify(tmp_path / destination).ok
    with pytest.raises(UnsupportedTensorError, match=f"not supported: model.{name}"):
        reshard(source, tmp_path / "resharded", 2)
    weight = torch.zeros(2)
    with pytest.raises(CheckpointMismatchError, match=f"model.{name}"):
        load(source, {"model": {"weight": weight, name: torch.ones(2)}})
    assert weight.tolist() == [0, 0]
    load(source, {"model": {"weight": weight}}, ignore=[f"model.{name}"])
    assert weight.tolist() == [1, 1]


def test_a_tensor_in_dcp_that_is_not_read_is_named(tmp_path: Path) -> None:
    quantized = unread_state()["quantized"]
    dcp.save({"w": torch.ones(2), "quantized": quantized}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert [(finding.code, finding.where) for finding in verify(tmp_path / "dcp").findings] == [("unsupported", "quantized")]
    with pytest.raises(CheckpointFormatError, match="not supported: quantized"):
        migrate(tmp_path / "dcp", tmp_path / "new")
    migrate(tmp_path / "dcp", tmp_path / "new", drop=["quantized"])


def test_s9_an_expanded_tensor_is_read_where_it_is_in_proportion(tmp_path: Path) -> None:
    state = {"mask": torch.ones(1).expand(100, 200), "windows": torch.arange(50.0).unfold(0, 10, 1)}
    torch.save(state, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 4000
    migrate(tmp_path / "x.pt", tmp_path / "new")
    with Reader(open_checkpoint(tmp_path / "new")) as reader:
        assert all(torch.equal(reader.tensor(key), tensor) for key, tensor in state.items())


@pytest.mark.parametrize("size", [1 << 29, 1 << 60])
def test_s9_a_tensor_expanded_out_of_proportion_is_named_and_not_read(tmp_path: Path, size: int) -> None:
    torch.save({"w": torch.ones(2), "huge": torch.ones(1).expand(size)}, tmp_path / "x.pt")
    assert list(open_checkpoint(tmp_path / "x.pt").tensors) == ["w"]
    (finding,) = verify(tmp_path / "x.pt").findings
    assert (finding.code, finding.where) == ("unsupported", "huge")
    with pytest.raises(UnsupportedTensorError, match=r"huge \(tensor expanded to"):
        migrate(tmp_path / "x.pt", tmp_path / "new")


def test_s9_many_overlapping_views_are_counted_together(tmp_path: Path) -> None:
    base = torch.arange(1 << 16, dtype=torch.uint8)
    torch.save({f"view{start}": base[start : start + (1 << 15)] for start in range(2000)}, tmp_path / "x.pt")
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    assert checkpoint.size_bytes < 1 << 25
    assert any(finding.code == "unsupported" for finding in verify(tmp_path / "x.pt").findings)


def test_s9_a_tensor_that_occurs_over_and_over_is_one_tensor(tmp_path: Path) -> None:
    tensor = torch.ones(1 << 10)
    torch.save({"v": [[tensor] * 1000, {"a": tensor}]}, tmp_path / "x.pt")
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    assert len(checkpoint.tensors) == 1001
    assert len({entry.tied_to or key for key, entry in checkpoint.tensors.items()}) == 1


def test_s9_expanded_tensors_in_a_dcp_value_are_refused(tmp_path: Path) -> None:
    # DCP treats a set as one value, and writes it with torch.save.
    dcp.save({"v": {torch.ones(1).expand(1 << 40)}}, checkpoint_id=tmp_path, no_dist=True)
    with Reader(open_checkpoint(tmp_path)) as reader, pytest.raises(UnsupportedTensorError, match=r"not supported: v: .*expanded"):
        reader.value("v")
