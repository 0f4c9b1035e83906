from __future__ import annotations

import argparse
import json
import struct
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from labkit.checkpoint import Reader, canonical_fqn, open_checkpoint
from labkit.checkpoint.data.read import same_bits
from labkit.checkpoint.errors import (
    CheckpointFormatError,
    CheckpointNotFoundError,
    FQNMismatchError,
    IncompleteCheckpointError,
)
from labkit.checkpoint.index.names import canonical_names, match_names, wrappers_in

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
]


def make(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of random bits, which includes NaN payloads and every sign; for bool only 0 and 1."""
    count = int(np.prod(shape)) * dtype.itemsize
    data = torch.randint(
        0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return data.view(dtype).reshape(shape)


def state(seed: int = 0) -> dict[str, object]:
    tensors = {
        f"t{i}": make(dtype, shape, seed + i)
        for i, (dtype, shape) in enumerate((d, s) for d in DTYPES for s in ((3, 5), (), (0, 2)))
    }
    return {"model": tensors, "step": 7, "rng": {"numbers": [1, 2, 3]}}


def assert_equal(path: Path, expected: dict[str, torch.Tensor]) -> None:
    checkpoint = open_checkpoint(path)
    assert set(checkpoint.tensors) == set(expected)
    with Reader(checkpoint) as reader:
        wrong = [key for key, tensor in expected.items() if not same_bits(reader.tensor(key), tensor.contiguous())]
    assert wrong == []


def flat(nested: dict[str, object]) -> dict[str, torch.Tensor]:
    return {f"model.{key}": tensor for key, tensor in nested["model"].items()}  # type: ignore[attr-defined]


def test_every_dtype_of_a_torch_save_file_reads_back_bit_for_bit(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "full.pt")
    assert_equal(tmp_path / "full.pt", flat(state()))


def test_every_dtype_of_a_dcp_directory_reads_back_bit_for_bit(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_equal(tmp_path / "dcp", flat(state()))
    checkpoint = open_checkpoint(tmp_path / "dcp")
    assert checkpoint.kind == "dcp"
    assert checkpoint.tensors["model.t0"].chunks[0].writer == 0
    with Reader(checkpoint) as reader:
        assert reader.value("step") == 7
        assert reader.value("rng.numbers") == [1, 2, 3]


def test_every_dtype_of_a_safetensors_file_reads_back_bit_for_bit(tmp_path: Path) -> None:
    save_file(state()["model"], tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_equal(tmp_path / "model.safetensors", state()["model"])
    assert open_checkpoint(tmp_path / "model.safetensors").metadata == {"format": "pt"}


def sharded(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {"a": torch.arange(6.0), "b": torch.ones(2, 3), "c": torch.zeros(1)}
    save_file({"a": tensors["a"]}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": tensors["b"], "c": tensors["c"]}, folder / "model-00002-of-00002.safetensors")
    names = {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return tensors


def test_sharded_safetensors_read_through_their_index_and_through_their_directory(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    assert_equal(tmp_path, tensors)
    assert_equal(tmp_path / "model.safetensors.index.json", tensors)


def test_a_missing_safetensors_shard_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"model-00002-of-00002\.safetensors: the index names this file"):
        open_checkpoint(tmp_path)


def test_an_index_that_points_outside_its_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(CheckpointFormatError, match="outside its own directory"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 15]}}, "do not agree"),
        ({"a": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}}, "F99"),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, "cut off"),
        ({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, -16]}}, "no tensor of torch"),
        ({"a": [1]}, "form that safetensors does not have"),
        ([1, 2], "not a JSON object"),
    ],
)
def test_a_wrong_safetensors_header_is_refused_by_name(tmp_path: Path, header: object, words: str) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises((CheckpointFormatError, IncompleteCheckpointError), match=words) as caught:
        open_checkpoint(tmp_path / "x.safetensors")
    assert "x.safetensors" in str(caught.value)


def test_views_ties_and_transposes_in_a_torch_save_file_keep_their_values(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    saved = {
        "whole": base,
        "rows": base[1:3],
        "transposed": base.t(),
        "column": base[:, 2],
        "expanded": torch.tensor([5.0]).expand(3),
        "tied": base,
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    torch.save(saved, tmp_path / "views.pt")
    assert_equal(tmp_path / "views.pt", {key: tensor.detach() for key, tensor in saved.items()})
    checkpoint = open_checkpoint(tmp_path / "views.pt")
    assert checkpoint.tensors["tied"].tied_to == "whole"
    assert checkpoint.tensors["rows"].tied_to is None


def test_a_transposed_tensor_in_dcp_keeps_its_values(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).reshape(4, 6).t()
    dcp.save({"t": tensor}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_equal(tmp_path / "dcp", {"t": tensor})
    with Reader(open_checkpoint(tmp_path / "dcp")) as reader:
        entry = reader.checkpoint.tensors["t"]
        assert torch.equal(reader.box(entry, (1, 2), (3, 2)), tensor[1:4, 2:4])


@settings(max_examples=40)
@given(data=st.data())
def test_any_box_of_any_tensor_equals_the_slice(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=4)))
    tensor = make(torch.int32, shape)
    path = tmp_path_factory.mktemp("box") / "x.pt"
    torch.save({"t": tensor}, path)
    low = [data.draw(st.integers(0, n - 1)) for n in shape]
    sizes = [data.draw(st.integers(0, n - a)) for n, a in zip(shape, low, strict=True)]
    with Reader(open_checkpoint(path)) as reader:
        got = reader.box(reader.checkpoint.tensors["t"], low, sizes)
    assert torch.equal(got, tensor[tuple(slice(a, a + n) for a, n in zip(low, sizes, strict=True))])


def test_values_that_are_no_tensors_come_back_as_plain_data(tmp_path: Path) -> None:
    generator = np.random.RandomState(3)
    values = {
        "scheduler": {"last_epoch": 3, "lrs": [0.1, 0.2], "_milestones": {1, 2}},
        "numpy": generator.get_state()[1],
        "scalar": np.float64(1.5),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "bytes": b"\x00\xff",
        "complex": 1 + 2j,
        "nothing": None,
        "ordered": OrderedDict(a=1),
        "empty": {},
    }
    torch.save(values, tmp_path / "values.pt")
    with Reader(open_checkpoint(tmp_path / "values.pt")) as reader:
        assert reader.value("scheduler._milestones") == {1, 2}
        assert np.array_equal(reader.value("numpy"), values["numpy"])
        assert reader.value("scalar") == 1.5
        assert reader.value("dtype") is torch.bfloat16
        assert reader.value("size") == (2, 3)
        assert reader.value("bytes") == b"\x00\xff"
        assert reader.value("complex") == 1 + 2j
        assert reader.value("ordered.a") == 1
        assert reader.value("empty") == {}


def test_an_object_on_the_allow_list_is_listed_and_not_rebuilt(tmp_path: Path) -> None:
    torch.save({"args": argparse.Namespace(lr=1)}, tmp_path / "args.pt")
    checkpoint = open_checkpoint(tmp_path / "args.pt")
    assert repr(checkpoint.values["args"].inline) == "<argparse.Namespace>"
    with Reader(checkpoint) as reader, pytest.raises(CheckpointFormatError, match=r"argparse\.Namespace"):
        reader.value("args")


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, -1])
def test_a_cut_torch_save_file_is_named(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "cut.pt"
    torch.save({"a": torch.ones(100)}, path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    with pytest.raises((IncompleteCheckpointError, CheckpointFormatError), match=r"cut\.pt"):
        open_checkpoint(path)


def test_a_cut_shard_of_a_dcp_directory_is_named_when_its_data_are_read(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(1000)}, checkpoint_id=tmp_path, no_dist=True)
    shard = tmp_path / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:2000])
    with Reader(open_checkpoint(tmp_path)) as reader, pytest.raises(IncompleteCheckpointError, match=r"__0_0\.distcp"):
        reader.tensor("a")


def test_a_missing_shard_and_a_missing_metadata_file_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    dcp.save({"a": torch.ones(10)}, checkpoint_id=folder, no_dist=True)
    (folder / "__0_0.distcp").rename(tmp_path / "elsewhere")
    with Reader(open_checkpoint(folder)) as reader, pytest.raises(IncompleteCheckpointError, match=r"__0_0\.distcp: .*missing"):
        reader.tensor("a")
    (tmp_path / "elsewhere").rename(folder / "__0_0.distcp")
    (folder / ".metadata").unlink()
    with pytest.raises(IncompleteCheckpointError, match="did not finish"):
        open_checkpoint(folder)


def test_another_dtype_in_the_data_than_in_the_metadata_is_refused(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(10)}, checkpoint_id=tmp_path / "one", no_dist=True)
    dcp.save({"a": torch.ones(10, dtype=torch.int32)}, checkpoint_id=tmp_path / "two", no_dist=True)
    (tmp_path / "two/__0_0.distcp").rename(tmp_path / "one/__0_0.distcp")
    with Reader(open_checkpoint(tmp_path / "one")) as reader, pytest.raises(CheckpointFormatError, match=r"float32.*int32"):
        reader.tensor("a")


def test_nothing_there_and_nothing_known_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no such file"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointNotFoundError, match="holds no checkpoint"):
        open_checkpoint(tmp_path)
    (tmp_path / "x.pt").write_bytes(b"hello there, this is text")
    with pytest.raises(CheckpointFormatError, match=r"x\.pt"):
        open_checkpoint(tmp_path / "x.pt")


def test_the_legacy_torch_format_is_named_with_the_way_out(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointFormatError, match=r"before 1\.6"):
        open_checkpoint(tmp_path / "old.pt")


@pytest.mark.parametrize("state", [torch.ones(3), [torch.ones(2), 1], {}, 5, None])
def test_a_file_that_holds_no_dict_is_listed_too(tmp_path: Path, state: object) -> None:
    torch.save(state, tmp_path / "x.pt")
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    if isinstance(state, torch.Tensor):
        assert_equal(tmp_path / "x.pt", {"value": state})
    else:
        assert len(checkpoint.tensors) == (1 if isinstance(state, list) else 0)


def test_sections_and_integer_keys_are_recognised(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "epoch": 3}, tmp_path / "x.pt")
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    assert {entry.key for entry in checkpoint.section("model")} == {"model.weight", "model.bias"}
    assert checkpoint.tensors["optim.state.0.exp_avg"].section == "optimizer"
    assert checkpoint.tensors["optim.state.0.exp_avg"].path == ("optim", "state", 0, "exp_avg")
    assert checkpoint.values["optim.param_groups.0.lr"].section == "optimizer"
    assert checkpoint.values["epoch"].section == "other"


WRAPPED = [
    ("_fsdp_wrapped_module.0.weight", "0.weight"),
    ("module.0.weight", "module.0.weight"),
    ("module._orig_mod.0.weight", "module.0.weight"),
    ("0._checkpoint_wrapped_module._fsdp_wrapped_module.weight", "0.weight"),
    ("_fsdp_wrapped_module.0._fsdp_wrapped_module._checkpoint_wrapped_module.weight", "0.weight"),
    ("_fsdp_wrapped_module._flat_param", "_flat_param"),
    ("block.module.weight", "block.module.weight"),
    ("net._orig_mod.module.weight", "net.module.weight"),
]


@pytest.mark.parametrize(("name", "expected"), WRAPPED)
def test_wrappers_leave_a_name_in_any_order(name: str, expected: str) -> None:
    assert canonical_fqn(name) == expected


@given(
    st.lists(st.sampled_from(["_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"]), max_size=6), st.integers(0, 3)
)
def test_wrappers_at_any_depth_give_one_canonical_name(wrappers: list[str], at: int) -> None:
    parts = ["layers", "0", "attention"]
    name = ".".join([*parts[:at], *wrappers, *parts[at:], "weight"])
    assert canonical_fqn(name) == "layers.0.attention.weight"
    assert canonical_fqn(canonical_fqn(name)) == canonical_fqn(name)


def test_names_that_collide_without_their_wrappers_are_refused() -> None:
    with pytest.raises(FQNMismatchError, match=r"_orig_mod\.a and a both become a"):
        canonical_names(["_orig_mod.a", "a"], "x.pt")


@pytest.mark.parametrize("inside", ["", "_orig_mod.", "module."])
def test_f_module_goes_from_the_front_where_every_name_begins_with_it_and_only_there(inside: str) -> None:
    names = [f"module.{inside}a", f"module.{inside}b.c"]
    assert canonical_names(names, "x.pt") == dict(zip(names, ["a", "b.c"], strict=True))
    kept = canonical_names([*names, "n_averaged"], "x.pt")
    assert kept["n_averaged"] == "n_averaged"
    assert kept[names[0]] == f"module.{inside}a".replace("_orig_mod.", "")


def test_a_real_submodule_called_module_is_matched_with_the_models_names() -> None:
    assert match_names(["net.module.weight"], ["net.module.weight"]) == {"net.module.weight": "net.module.weight"}
    assert match_names(["net.module.weight"], ["net.weight"]) == {"net.module.weight": "net.weight"}
    assert match_names(["net.weight"], ["net._orig_mod.weight"]) == {"net.weight": "net._orig_mod.weight"}
    assert wrappers_in(["module.a._orig_mod.b"]) == {"module": 1, "_orig_mod": 1}
