"""Migration and resharding: bit-equal, streaming, refusing what is ambiguous."""

from __future__ import annotations

import functools
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from labkit import checkpoint
from labkit.checkpoint import Reader, migrate, open_checkpoint, reshard, verify
from labkit.checkpoint.cli import checkpoint as command
from labkit.checkpoint.convert.rename import Rule, read_rules
from labkit.checkpoint.convert.resharding import parse_rule
from labkit.checkpoint.data.read import same_bits
from labkit.checkpoint.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointMismatchError,
    CorruptCheckpointError,
    DtypeNarrowingError,
    FQNMismatchError,
    IncompleteCheckpointError,
)
from labkit.checkpoint.index.layout import ShardDim, coordinate_of, local_box
from labkit.spmd.shards.layouts import parse_mesh
from tests.unit.test_checkpoint_formats import DTYPES, make


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens) * self.scale))


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        model(torch.arange(7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        del step
    return model, optimizer


def full_file(path: Path, prefix: str = "") -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained()
    state = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    torch.save({"model": state, "optim": optimizer.state_dict(), "epoch": 3, "sched": {"last": 2}}, path)
    return model, optimizer


def test_a_full_file_becomes_what_torchs_state_dict_functions_load(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model, optimizer = full_file(tmp_path / "full.pt", prefix="module._orig_mod.")
    result = migrate(tmp_path / "full.pt", tmp_path / "dcp", model=Net())
    assert result.num_tensors == 22
    assert verify(tmp_path / "dcp", model=Net()).findings == []
    other = Net()
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    target: dict[str, Any] = {"model": other.state_dict(), "optim": get_optimizer_state_dict(other, fresh), "epoch": 0}
    dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_optimizer_state_dict(other, fresh, target["optim"])
    assert target["epoch"] == 3
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    assert fresh.param_groups[0]["lr"] == 0.01
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        for piece, value in optimizer.state[theirs].items():
            assert torch.equal(fresh.state[mine][piece], value)


def test_labkit_loads_what_it_migrated(tmp_path: Path) -> None:
    model, optimizer = full_file(tmp_path / "full.pt")
    migrate(tmp_path / "full.pt", tmp_path / "dcp", model=Net())
    other = Net()
    fresh = torch.optim.AdamW(other.parameters())
    state = {"model": other, "optim": fresh, "epoch": 0}
    checkpoint.load(tmp_path / "dcp", state, ignore=["sched.*"])
    assert state["epoch"] == 3
    assert other.head.weight is other.embed.weight
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(fresh.state[mine]["exp_avg_sq"], optimizer.state[theirs]["exp_avg_sq"])


def test_numbered_state_needs_names_and_the_right_ones(tmp_path: Path) -> None:
    full_file(tmp_path / "full.pt")
    with pytest.raises(FQNMismatchError, match=r"--model FILE\.py:FUNCTION.*--order"):
        migrate(tmp_path / "full.pt", tmp_path / "dcp")
    with pytest.raises(FQNMismatchError, match="had 5 parameters, and 2 names are in the order"):
        migrate(tmp_path / "full.pt", tmp_path / "dcp", order=["a", "b"])
    names = [name for name, _ in Net().named_parameters()]
    with pytest.raises(CheckpointMismatchError, match="--order"):
        migrate(tmp_path / "full.pt", tmp_path / "dcp", order=names[::-1], model=Net())
    migrate(tmp_path / "full.pt", tmp_path / "dcp", order=names)
    assert not list(tmp_path.glob("*.partial"))


def test_two_groups_are_refused_without_their_order(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW([{"params": model[1].parameters()}, {"params": model[0].parameters()}])
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "x.pt")
    with pytest.raises(FQNMismatchError, match="has 2 parameter groups and numbers instead of names"):
        migrate(tmp_path / "x.pt", tmp_path / "dcp", model=model)
    migrate(tmp_path / "x.pt", tmp_path / "dcp", model=model, order=["1.weight", "1.bias", "0.weight", "0.bias"])
    with Reader(open_checkpoint(tmp_path / "dcp")) as reader:
        assert torch.equal(reader.tensor("optim.state.1.weight.exp_avg"), optimizer.state[model[1].weight]["exp_avg"])
        assert reader.value("optim.param_groups.0.params") == ["1.weight", "1.bias"]


def test_a_model_that_the_weights_do_not_fit_is_refused_by_names_and_shapes(tmp_path: Path) -> None:
    full_file(tmp_path / "full.pt")

    class Wider(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.ones(5)

    class Longer(Net):
        def __init__(self) -> None:
            super().__init__()
            self.tail = nn.Linear(4, 4)

    out, order = tmp_path / "out", [name for name, _ in Net().named_parameters()]
    with pytest.raises(CheckpointMismatchError, match=r"scale has shape \(4,\), but \(5,\) in the model"):
        migrate(tmp_path / "full.pt", out, model=Wider)
    with pytest.raises(FQNMismatchError, match=r"missing in the checkpoint: tail\.weight") as caught:
        migrate(tmp_path / "full.pt", out, model=Longer, order=order)
    assert caught.value.missing == ("tail.weight", "tail.bias")
    migrate(tmp_path / "full.pt", tmp_path / "without", model=Longer, order=order, drop=["model.tail.*"])
    # A model without some of the saved entries: an error, unless they are dropped.
    torch.save({"model": Net().state_dict() | {"inv_freq": torch.ones(2)}}, tmp_path / "more.pt")
    with pytest.raises(FQNMismatchError, match="unexpected in the checkpoint: inv_freq"):
        migrate(tmp_path / "more.pt", out, model=Net)
    assert not out.exists()
    migrate(tmp_path / "more.pt", out, model=Net, drop=["model.inv_freq"])


def test_a_model_may_be_the_one_before_or_after_the_rename_rules(tmp_path: Path) -> None:
    saved = {name.replace("body.", "layers."): value for name, value in Net().state_dict().items()}
    del saved["embed.weight"]  # tied to head.weight
    torch.save({"model": saved}, tmp_path / "old.pt")
    migrate(tmp_path / "old.pt", tmp_path / "new", model=Net, rules=[Rule("layers.*", "body.*")])
    assert verify(tmp_path / "new", model=Net()).findings == []
    with pytest.raises(FQNMismatchError, match=r"unexpected in the checkpoint: layers\.0\.weight"):
        migrate(tmp_path / "old.pt", tmp_path / "other", model=Net, rules=[Rule("layers.*", "trunk.*")])


def test_a_round_trip_through_torch_save_restores_moments_and_ties(tmp_path: Path) -> None:
    model, optimizer = full_file(tmp_path / "full.pt")
    migrate(tmp_path / "full.pt", tmp_path / "dcp", model=Net())
    migrate(tmp_path / "full.pt", tmp_path / "again.pt", model=Net())
    for options in ({"weights_only": True}, {"weights_only": True, "mmap": True}):
        state = torch.load(tmp_path / "again.pt", **options)
        assert state["epoch"] == 3
        assert state["sched"] == {"last": 2}
        assert all(torch.equal(value, state["model"][name]) for name, value in model.state_dict().items())
        assert torch.equal(state["optim"]["state"]["body.0.weight"]["exp_avg"], optimizer.state[model.body[0].weight]["exp_avg"])
        assert (
            state["model"]["head.weight"].untyped_storage().data_ptr()
            == state["model"]["embed.weight"].untyped_storage().data_ptr()
        )
    assert verify(tmp_path / "again.pt", against=tmp_path / "dcp").ok


def test_digits_that_dcp_made_of_parameter_numbers_become_numbers_again(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

    model, optimizer = full_file(tmp_path / "full.pt")
    torch_save_to_dcp(tmp_path / "full.pt", tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "torch.pt")
    # The trap: the keys are text now, load_state_dict says nothing and restores nothing.
    theirs = torch.load(tmp_path / "torch.pt", weights_only=True)["optim"]
    assert set(theirs["state"]) == {"0", "1", "2", "3", "4"}
    fresh = torch.optim.AdamW(model.parameters())
    fresh.load_state_dict(theirs)
    assert "exp_avg" not in fresh.state[model.body[0].weight]
    names = [name for name, _ in Net().named_parameters()]
    migrate(tmp_path / "dcp", tmp_path / "ours.pt", order=names)
    state = torch.load(tmp_path / "ours.pt", weights_only=True)["optim"]["state"]
    assert torch.equal(state["body.0.weight"]["exp_avg"], optimizer.state[model.body[0].weight]["exp_avg"])
    with pytest.raises(FQNMismatchError, match="numbered by position"):
        migrate(tmp_path / "dcp", tmp_path / "other.pt")


def test_safetensors_and_back(tmp_path: Path) -> None:
    model, _ = full_file(tmp_path / "full.pt")
    with pytest.raises(
        CheckpointError, match=r"more than model: optim \(15 tensors, 12 values\), epoch \(1 value\).*--only 'model'\."
    ):
        migrate(tmp_path / "full.pt", tmp_path / "model.safetensors", model=Net())
    result = migrate(tmp_path / "full.pt", tmp_path / "model.safetensors", model=Net(), only=["model"])
    assert any("left out" in note and "optim (15 tensors, 12 values)" in note for note in result.notes)
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == model.state_dict().keys() - {"head.weight"}
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.items())
    migrate(tmp_path / "full.pt", tmp_path / "sharded", to="safetensors", shard_bytes=200, model=Net(), only=["model"])
    index = json.loads((tmp_path / "sharded/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    migrate(tmp_path / "sharded", tmp_path / "dcp")
    assert verify(tmp_path / "dcp", against=tmp_path / "model.safetensors").ok
    target = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(value, target[name]) for name, value in model.state_dict().items())


def test_rules_drops_and_dtypes(tmp_path: Path) -> None:
    full_file(tmp_path / "full.pt")
    (tmp_path / "table").write_text("# a table\nbody.*.weight -> layers.*.w\nscale ->\n\nembed.weight -> tok.weight # tied\n")
    rules = read_rules(tmp_path / "table")
    assert rules[0] == Rule("body.*.weight", "layers.*.w")
    migrate(
        tmp_path / "full.pt", tmp_path / "dcp", model=Net(), rules=rules, drop=["sched.*"], dtypes={"layers.0.*": torch.bfloat16}
    )
    found = open_checkpoint(tmp_path / "dcp")
    assert "model.layers.0.w" in found.tensors
    assert found.tensors["model.layers.0.w"].dtype is torch.bfloat16
    assert "optim.state.layers.1.w.exp_avg" in found.tensors
    assert not [key for key in (*found.tensors, *found.values) if "scale" in key or key.startswith("sched")]
    with Reader(found) as reader:
        assert "layers.0.w" in reader.value("optim.param_groups.0.params")
    (tmp_path / "table").write_text("a -> b.*")
    with pytest.raises(CheckpointError, match="line 1"):
        read_rules(tmp_path / "table")
    with pytest.raises(FQNMismatchError, match="two entries get the name"):
        migrate(tmp_path / "full.pt", tmp_path / "x", model=Net(), rules=[Rule("body.*", "same")])


def test_a_dtype_that_overflows_is_refused_by_name(tmp_path: Path) -> None:
    torch.save({"a": torch.tensor([70000.0]), "b": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(DtypeNarrowingError, match="a: 1 finite values become inf"):
        migrate(tmp_path / "x.pt", tmp_path / "dcp", dtypes={"*": torch.float16})
    assert not (tmp_path / "dcp").exists()


def test_the_destination_is_never_overwritten(tmp_path: Path) -> None:
    full_file(tmp_path / "full.pt")
    (tmp_path / "dcp").mkdir()
    with pytest.raises(CheckpointExistsError):
        migrate(tmp_path / "full.pt", tmp_path / "dcp", model=Net())
    with pytest.raises(CheckpointExistsError):
        reshard(tmp_path / "full.pt", tmp_path / "dcp", 2)


@pytest.mark.parametrize("manifest", [True, False])
def test_a_missing_file_of_a_dcp_directory_is_named_and_nothing_else_is_advised(tmp_path: Path, manifest: bool) -> None:
    if manifest:
        torch.save({"a": torch.ones(6, 2), "step": 3}, tmp_path / "x.pt")
        reshard(tmp_path / "x.pt", tmp_path / "dcp", 2)
    else:
        dcp.save({"a": torch.ones(6, 2), "step": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "dcp/__0_0.distcp").unlink()
    for work in (migrate, functools.partial(reshard, mesh=2)):
        with pytest.raises(IncompleteCheckpointError, match=r"__0_0\.distcp: .*it is missing\. Copy it") as caught:
            work(tmp_path / "dcp", tmp_path / "out")
        assert "drop" not in str(caught.value)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("name", "to", "message"),
    [
        ("out.safetensors", "torch", r"--to torch\) and the suffix \.safetensors contradict each other"),
        ("out.pt", "dcp", r"--to dcp\) and the suffix \.pt contradict"),
        ("out.bin", "safetensors", r"--to safetensors\) and the suffix \.bin contradict"),
        ("out.onnx", None, r"suffix \.onnx names no format.*\.safetensors or \.pt, \.pth, \.bin, \.ckpt.*--to"),
    ],
)
def test_a_suffix_that_says_another_format_or_none_is_refused_before_anything_is_written(
    tmp_path: Path, name: str, to: Any, message: str
) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=message):
        migrate(tmp_path / "x.pt", tmp_path / name, to=to)
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]


@pytest.mark.parametrize(("name", "kind"), [("llama-3.1-8b", "dcp"), ("step.100", "dcp"), ("OUT.PT", "torch")])
def test_a_dot_in_a_directorys_name_is_no_suffix(tmp_path: Path, name: str, kind: str) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt")
    migrate(tmp_path / "x.pt", tmp_path / name)
    assert open_checkpoint(tmp_path / name).kind == kind


def test_nothing_is_written_into_the_source(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for work in (migrate, functools.partial(reshard, mesh=2)):
        with pytest.raises(CheckpointError, match="a source is only read"):
            work(tmp_path / "dcp", tmp_path / "dcp/sub/new")
    assert not (tmp_path / "dcp/sub").exists()


def test_a_flipped_bit_in_the_source_is_refused(tmp_path: Path) -> None:
    big = torch.arange(1000.0).reshape(10, 100)
    dcp.save({"a": big}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save({"a": big, "b": big[2:4], "c": big.t()}, tmp_path / "x.pt")
    for source, file in ((tmp_path / "dcp", "dcp/__0_0.distcp"), (tmp_path / "x.pt", "x.pt")):
        data = bytearray((tmp_path / file).read_bytes())
        data[data.find(big.numpy().tobytes()) + 1999] ^= 8
        (tmp_path / file).write_bytes(data)
        for number, run in enumerate((migrate, functools.partial(reshard, mesh=3))):
            with pytest.raises(CorruptCheckpointError, match="checksum"):
                run(source, tmp_path / f"out{number}")
            assert not (tmp_path / f"out{number}").exists()
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        checkpoint.load(tmp_path / "dcp", {"a": torch.zeros(10, 100)})


def test_each_rank_of_the_next_job_reads_one_whole_file(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(7, 3), "b": torch.randn(2, 5), "c": torch.randn(1), "s": torch.tensor(3.0), "d": torch.randn(4, 4)}
    torch.save(tensors, tmp_path / "x.pt")
    reshard(tmp_path / "x.pt", tmp_path / "out", 3)
    found = open_checkpoint(tmp_path / "out")
    for rank in range(3):
        name = f"__{rank}_0.distcp"
        ranges = []
        for key, tensor in tensors.items():
            box = local_box(tensor.shape, (3,), (rank,), [None if tensor.dim() == 0 else ShardDim(0)])
            held = [chunk for chunk in found.tensors[key].chunks if (chunk.offsets, chunk.sizes) == box]
            ranges += [(chunk.start, chunk.length) for chunk in held if chunk.file == name]
        ranges.sort()
        assert ranges[0][0] == 0
        assert all(start + length == after for (start, length), (after, _) in pairwise(ranges))
        assert sum(ranges[-1]) == found.files[name]
    assert verify(tmp_path / "out", against=tmp_path / "x.pt").findings == []


def test_a_mesh_cuts_by_its_rules(tmp_path: Path) -> None:
    torch.save(
        {"w1": torch.arange(48.0).reshape(8, 6), "w2": torch.arange(48.0).reshape(6, 8), "n": torch.ones(5)}, tmp_path / "x.pt"
    )
    reshard(tmp_path / "x.pt", tmp_path / "out", parse_mesh("dp=2,tp=2"), rules=[parse_rule("tp:w1=0"), parse_rule("tp:w2=-1")])
    found = open_checkpoint(tmp_path / "out")
    boxes = {
        key: sorted((chunk.offsets, chunk.sizes, chunk.writer) for chunk in entry.chunks) for key, entry in found.tensors.items()
    }
    assert boxes["w1"] == [((0, 0), (2, 6), 0), ((2, 0), (2, 6), 2), ((4, 0), (2, 6), 1), ((6, 0), (2, 6), 3)]
    assert boxes["w2"] == [((0, 0), (3, 4), 0), ((0, 4), (3, 4), 1), ((3, 0), (3, 4), 2), ((3, 4), (3, 4), 3)]
    assert boxes["n"] == [((0,), (3,), 0), ((3,), (2,), 2)]
    assert verify(tmp_path / "out", against=tmp_path / "x.pt").findings == []
    for text in ("dp", "dp=0", "dp=2,dp=2"):
        with pytest.raises(ValueError, match="cannot read the mesh"):
            parse_mesh(text)
    with pytest.raises(CheckpointError, match="cannot read the rule"):
        parse_rule("tp w1")
    with pytest.raises(CheckpointError, match="does not fit w1"):
        reshard(tmp_path / "x.pt", tmp_path / "y", {"tp": 2}, rules=[parse_rule("tp:w1=2")])
    with pytest.raises(CheckpointError, match="names the axis 'pp'"):
        reshard(tmp_path / "x.pt", tmp_path / "y", {"tp": 2}, rules=[parse_rule("pp:w1=0")])


def test_the_command_line_migrates_reshards_and_tells(tmp_path: Path) -> None:
    torch.save({"module.a": torch.ones(4, 4)}, tmp_path / "x.pt")
    runner = CliRunner()
    done = runner.invoke(command, ["migrate", str(tmp_path / "x.pt"), str(tmp_path / "dcp")])
    assert done.exit_code == 0, done.output
    assert "1 tensor, 64 B, in 1 file, verified" in done.output
    done = runner.invoke(command, ["reshard", str(tmp_path / "dcp"), str(tmp_path / "r"), "--mesh", "dp=2"])
    assert done.exit_code == 0, done.output
    assert runner.invoke(command, ["verify", str(tmp_path / "r"), "--against", str(tmp_path / "x.pt")]).exit_code == 0
    told = runner.invoke(command, ["show", str(tmp_path / "r"), "--json"])
    assert json.loads(told.output)["tensors"][0]["num_chunks"] == 2
    failed = runner.invoke(command, ["migrate", str(tmp_path / "x.pt"), str(tmp_path / "dcp")])
    assert failed.exit_code == 1
    assert "destination exists" in failed.output
    assert runner.invoke(command, ["reshard", str(tmp_path / "dcp"), str(tmp_path / "q")]).exit_code == 2


SHAPES = st.lists(st.sampled_from([1, 2, 3, 5, 7, 0]), max_size=3).map(tuple)


@settings(max_examples=25)
@given(
    tensors=st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=5),
    mesh=st.sampled_from([{"dp": n} for n in range(1, 6)] + [{"dp": 2, "tp": 2}, {"tp": 3}, {"replicate": 2, "dp": 2}]),
    dim=st.integers(-3, 2),
    back=st.sampled_from(["x.pt", "x.safetensors", "x"]),
)
def test_any_tensors_survive_any_chain_of_formats_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Any], mesh: dict[str, int], dim: int, back: str
) -> None:
    folder = tmp_path_factory.mktemp("chain")
    made = {name: make(dtype, shape, index) for index, (name, (dtype, shape)) in enumerate(tensors.items())}
    torch.save({"model": made}, folder / "start.pt")
    rules = [
        parse_rule(f"tp:{name}={dim}") for name, tensor in made.items() if "tp" in mesh and -tensor.dim() <= dim < tensor.dim()
    ]
    migrate(folder / "start.pt", folder / "dcp")
    reshard(folder / "dcp", folder / "cut", mesh, rules=rules)
    migrate(folder / "cut", folder / back)
    with Reader(open_checkpoint(folder / back)) as reader:
        found = {entry.key.removeprefix("model."): reader.tensor(entry.key) for entry in reader.checkpoint.tensors.values()}
    assert found.keys() == made.keys()
    assert [name for name in made if not same_bits(found[name], made[name])] == []


@given(
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    mesh=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    data=st.data(),
)
def test_the_boxes_of_all_ranks_cover_a_tensor_exactly(shape: list[int], mesh: list[int], data: st.DataObject) -> None:
    from labkit.checkpoint.index.layout import ShardDim

    placements = [data.draw(st.one_of(st.none(), st.builds(ShardDim, st.integers(0, len(shape) - 1), st.booleans()))) for _ in mesh]
    count = torch.zeros(shape, dtype=torch.int64)
    total = 1
    for size in mesh:
        total *= size
    replicas = 1
    for size, placement in zip(mesh, placements, strict=True):
        replicas *= size if placement is None else 1
    for rank in range(total):
        offsets, sizes = local_box(shape, mesh, coordinate_of(rank, mesh), placements)
        count[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    assert (count == replicas).all()


def test_save_file_of_the_safetensors_library_and_ours_agree_byte_for_byte_in_the_data(tmp_path: Path) -> None:
    tensors = {f"t{index}": make(dtype, (3, 2), index) for index, dtype in enumerate(DTYPES)}
    torch.save(tensors, tmp_path / "x.pt")
    migrate(tmp_path / "x.pt", tmp_path / "ours.safetensors")
    save_file(tensors, tmp_path / "theirs.safetensors")
    ours, theirs = load_file(tmp_path / "ours.safetensors"), load_file(tmp_path / "theirs.safetensors")
    assert [name for name in theirs if not same_bits(ours[name], theirs[name])] == []


@pytest.mark.parametrize("to", ["fsdp2", "DCP", "pt", "hf"])
def test_a_format_that_does_not_exist_is_refused_before_anything_is_written(tmp_path: Path, to: Any) -> None:
    torch.save({"model": {"weight": torch.ones(2)}}, tmp_path / "full.pt")
    with pytest.raises(CheckpointError, match=f"to='{to}' is not a format. Use 'dcp'"):
        migrate(tmp_path / "full.pt", tmp_path / "new", to=to)
    assert not (tmp_path / "new").exists()
