"""FSDP1's flat parameters, and moments spread over the ranks' files: whole afterwards, or refused."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torch.testing._internal.distributed.fake_pg import FakeStore

from labkit.checkpoint import Reader, migrate, open_checkpoint, reshard
from labkit.checkpoint.cli import checkpoint as command
from labkit.checkpoint.errors import CheckpointError, CheckpointMismatchError, FQNMismatchError, IncompleteCheckpointError

RANKS = 2


class Net(nn.Module):
    """Two equal blocks, a frozen unit, and a root with a norm, as in a small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 3) for _ in range(2))
        self.frozen = nn.Linear(4, 4, bias=False)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(4)


UNITS = {
    "": ["embed.weight", "norm.weight", "norm.bias"],
    "blocks.0": ["blocks.0.weight", "blocks.0.bias"],
    "blocks.1": ["blocks.1.weight", "blocks.1.bias"],
    "frozen": ["frozen.weight"],
}
SHAPES = {name: tuple(parameter.shape) for name, parameter in Net().named_parameters()}
VALUES = {name: torch.arange(float(prod(shape))).reshape(shape) + 100 * index for index, (name, shape) in enumerate(SHAPES.items())}
MOMENTS = {name: -value - 1 for name, value in VALUES.items()}
ORIGINAL_GROUPS = [
    ["embed.weight", "blocks.0.weight", "blocks.1.weight"],
    ["blocks.0.bias", "blocks.1.bias", "norm.weight", "norm.bias"],
]


@pytest.fixture(autouse=True)
def _no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def sharded(flat: torch.Tensor, rank: int) -> ShardedTensor:
    """Rank ``rank``'s view of a vector that is cut as by :func:`torch.chunk`."""
    pieces = list(flat.chunk(RANKS))
    starts = [sum(piece.numel() for piece in pieces[:index]) for index in range(RANKS)]
    shards = [
        ShardMetadata([start], [piece.numel()], f"rank:{index}/cpu")
        for index, (start, piece) in enumerate(zip(starts, pieces, strict=True))
    ]
    metadata = ShardedTensorMetadata(shards, flat.size(), TensorProperties(dtype=flat.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(pieces[rank].clone(), shards[rank])], metadata, sharding_spec=EnumerableShardingSpec(shards)
    )


def concatenated(values: Mapping[str, torch.Tensor], unit: str, original: bool) -> torch.Tensor:
    """A unit's flat vector; with ``use_orig_params`` each parameter begins at 16 bytes and the end is padded."""
    parts: list[torch.Tensor] = []
    for name in UNITS[unit]:
        at = sum(part.numel() for part in parts)
        parts += [torch.zeros(-at % 4 if original else 0), values[name].reshape(-1)]
    flat = torch.cat(parts)
    return torch.cat([flat, torch.zeros(-flat.numel() % RANKS if original else 0)])


def pieces_of(name: str) -> list[torch.Tensor]:
    """Each rank's part of a parameter's moment under ``use_orig_params=True``."""
    unit = next(unit for unit, names in UNITS.items() if name in names)
    marks = {other: torch.full(SHAPES[other], float(other == name)) for other in UNITS[unit]}
    mine, moment = concatenated(marks, unit, True).chunk(RANKS), concatenated(MOMENTS, unit, True).chunk(RANKS)
    return [values[where == 1] for values, where in zip(moment, mine, strict=True)]


def save_local(folder: Path, groups: Sequence[Sequence[str]], *, original: bool = False, stateless: Sequence[str] = ()) -> Path:
    """The state that each FSDP1 rank saves with LOCAL_STATE_DICT and ``optimizer.state_dict()``; groups of units or names."""
    folder.mkdir(exist_ok=True)
    for rank in range(RANKS):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        model: dict[str, Any] = {}
        for unit in UNITS:
            model[f"{unit}._flat_param".lstrip(".")] = sharded(concatenated(VALUES, unit, original), rank)
        state: dict[int, Any] = {}
        described, number = [], 0
        for group in groups:
            described.append({"lr": 0.1, "params": list(range(number, number + len(group)))})
            for member in group:
                if original:
                    piece = pieces_of(member)[rank]
                else:
                    flat = concatenated(MOMENTS, member, False)
                    piece = torch.cat([flat, torch.zeros(-flat.numel() % RANKS)]).chunk(RANKS)[rank].clone()
                if member not in stateless and piece.numel():
                    state[number] = {"step": torch.tensor(3.0), "exp_avg": piece}
                number += 1
        torch.save(
            {"model": model, "optim": {"state": state, "param_groups": described}}, folder / f"ckpt_rank_{rank}_of_{RANKS}.pt"
        )
        dist.destroy_process_group()
    return folder


def check(path: Path, names: Sequence[str]) -> None:
    """Require all values, and the moments of these names and no others, bit for bit."""
    with Reader(open_checkpoint(path)) as reader:
        for name, value in VALUES.items():
            assert torch.equal(reader.tensor(f"model.{name}"), value)
        for name in names:
            assert torch.equal(reader.tensor(f"optim.state.{name}.exp_avg"), MOMENTS[name])
            assert reader.tensor(f"optim.state.{name}.step") == 3
        held = {key.removeprefix("optim.state.").rpartition(".")[0] for key in reader.checkpoint.tensors if key.startswith("optim")}
        assert held == set(names)


# -- reshard ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("original", [True, False])
def test_reshard_refuses_flat_parameters_and_says_what_comes_first(tmp_path: Path, original: bool) -> None:
    groups = ORIGINAL_GROUPS if original else [["", "blocks.0", "blocks.1"]]
    save_local(tmp_path / "old", groups, original=original)
    for source in (tmp_path / "old", tmp_path / "old/ckpt_rank_0_of_2.pt"):
        with pytest.raises(CheckpointError, match=r"(?s)_flat_param.*labkit checkpoint migrate.*--model"):
            reshard(source, tmp_path / "new", 3)
    assert not (tmp_path / "new").exists()


def test_moments_in_pieces_beside_whole_weights_are_never_one_ranks_share(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for rank in range(RANKS):
        state = {"state": {0: {"exp_avg": torch.arange(3.0) + rank}}, "param_groups": [{"params": [0]}]}
        torch.save({"model": {"w": torch.ones(2, 3)}, "optim": state}, tmp_path / f"old/rank{rank}.pt")
    with pytest.raises(CheckpointError, match=r"(?s)optim\.state\.0\.exp_avg.*labkit checkpoint migrate.*--model"):
        reshard(tmp_path / "old", tmp_path / "new", 3)
    assert not (tmp_path / "new").exists()


def test_equal_copies_of_numbered_state_in_all_rank_files_are_no_pieces(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    state = {"state": {0: {"exp_avg": torch.arange(3.0)}}, "param_groups": [{"params": [0]}]}
    for rank in range(RANKS):
        torch.save({"model": {"b": torch.ones(3)}, "optim": state}, tmp_path / f"old/rank{rank}.pt")
    reshard(tmp_path / "old", tmp_path / "new", 3)
    with Reader(open_checkpoint(tmp_path / "new")) as reader:
        assert torch.equal(reader.tensor("optim.state.0.exp_avg"), torch.arange(3.0))
    migrate(tmp_path / "old", tmp_path / "named", order=["b"])


def test_a_shard_rule_that_matches_nothing_is_noted(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4, 4)}, tmp_path / "x.pt")
    told = CliRunner().invoke(
        command, ["reshard", str(tmp_path / "x.pt"), str(tmp_path / "out"), "--mesh", "tp=2", "--shard", "tp:*.nosuch=0"]
    )
    assert told.exit_code == 0, told.output
    assert "note: the shard pattern 'tp:*.nosuch' matches nothing" in told.output


# -- migrate ----------------------------------------------------------------------------------------------------------


def test_pieces_are_never_migrated_without_the_model_that_joins_them(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for rank in range(RANKS):
        state = {"state": {0: {"exp_avg": torch.arange(3.0) + rank}}, "param_groups": [{"params": [0]}]}
        torch.save({"model": {"w": torch.ones(2, 3)}, "optim": state}, tmp_path / f"old/rank{rank}.pt")
    for options in ({"order": ["w"]}, {"drop": ["optim.param_groups*"]}):
        with pytest.raises(FQNMismatchError, match=r"(?s)share of optim\.state\.0\.exp_avg.*--model"):
            migrate(tmp_path / "old", tmp_path / "new", **options)  # type: ignore[arg-type]


FLAT_GROUPS = [["blocks.1", "blocks.0"], [""]]
FLAT_NAMES = ["blocks.1._flat_param", "blocks.0._flat_param", "_flat_param"]
TRAINED = [name for name in SHAPES if not name.startswith("frozen")]


@pytest.mark.parametrize(
    "order",
    [
        FLAT_NAMES,
        [f"_fsdp_wrapped_module.{name}" for name in FLAT_NAMES],
        [name for group in FLAT_GROUPS for unit in group for name in UNITS[unit]],
        ["blocks.1.weight", "blocks.0.weight", "embed.weight"],
    ],
    ids=["flat", "wrapped", "all", "first"],
)
def test_groups_of_flat_parameters_are_named_by_them_or_by_what_is_in_them(tmp_path: Path, order: list[str]) -> None:
    save_local(tmp_path / "old", FLAT_GROUPS)
    with pytest.raises(FQNMismatchError, match=r"(?s)2 parameter groups and numbers instead of names.*--order"):
        migrate(tmp_path / "old", tmp_path / "new", model=Net)
    migrate(tmp_path / "old", tmp_path / "new", model=Net, order=order)
    check(tmp_path / "new", TRAINED)
    with Reader(open_checkpoint(tmp_path / "new")) as reader:
        assert reader.value("optim.param_groups.1.params") == UNITS[""]


@pytest.mark.parametrize("given", [["", "blocks.0", "blocks.1", "frozen"], ["", "blocks.0", "blocks.1"]], ids=["all", "trainable"])
def test_one_group_of_flat_parameters_follows_the_model_without_its_frozen_units(tmp_path: Path, given: list[str]) -> None:
    save_local(tmp_path / "old", [given], stateless=["frozen"])
    result = migrate(tmp_path / "old", tmp_path / "new", model=Net)
    check(tmp_path / "new", TRAINED)
    assert [note for note in result.notes if "2 flat parameters share shapes with others, so a swap would not show" in note]
    without_state = [note for note in result.notes if note == "1 parameter of the optimizer's groups had no state"]
    assert len(without_state) == ("frozen" in given)


def test_groups_of_original_parameters_are_joined_by_their_order(tmp_path: Path) -> None:
    save_local(tmp_path / "old", ORIGINAL_GROUPS, original=True)
    names = [name for group in ORIGINAL_GROUPS for name in group]
    migrate(tmp_path / "old", tmp_path / "new", model=Net, order=names)
    check(tmp_path / "new", TRAINED)


def test_an_order_that_cannot_be_is_refused_by_what_is_wrong_with_it(tmp_path: Path) -> None:
    flat = save_local(tmp_path / "flat", FLAT_GROUPS)
    original = save_local(tmp_path / "original", ORIGINAL_GROUPS, original=True)
    names = [name for group in ORIGINAL_GROUPS for name in group]
    for source, order, message in (
        (
            original,
            [*names[:-1], "norm.bia"],
            r"order names norm\.bia, but the model has no such parameter \(did you mean norm\.bias\?\)",
        ),
        (original, [*names[:-1], names[0]], r"order names embed\.weight twice"),
        (original, names[:-1], r"its optimizer had 7 parameters, and 6 names are in the order"),
        (original, names[::-1], r"(?s)its pieces have .* not in the optimizer's order.*--order"),
        (original, FLAT_NAMES, r"had 7 parameters, and 3 names are in the order; the checkpoint has 4 flat parameters"),
        (flat, [*FLAT_NAMES[:-1], "blocks.2._flat_param"], r"order names blocks\.2\._flat_param, but the checkpoint has no such"),
        (flat, [*FLAT_NAMES[:-1], "embed.weight"], r"order names both flat parameters \(blocks\.1\._flat_param\) and others"),
        (flat, FLAT_NAMES[::-1], r"(?s)state 0 of its optimizer has 16 elements.*root has 36.* not in the optimizer's order"),
        (flat, names, r"not in the optimizer's order"),
    ):
        with pytest.raises(CheckpointMismatchError, match=message):
            migrate(source, tmp_path / "new", model=Net, order=order)
    assert not list(tmp_path.glob("new*"))


def test_numbers_of_two_optimizers_or_of_no_group_are_refused(tmp_path: Path) -> None:
    model = {"a": torch.ones(2), "b": torch.ones(2)}
    moments = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": model, "opt_a": moments, "opt_b": moments}, tmp_path / "two.pt")
    with pytest.raises(FQNMismatchError, match=r"(?s)opt_a, opt_b each number.*--drop 'opt_b\.\*' keeps opt_a"):
        migrate(tmp_path / "two.pt", tmp_path / "new", order=["a", "b"])
    migrate(tmp_path / "two.pt", tmp_path / "new", order=["a"], drop=["opt_b.*"])
    torch.save(
        {"model": model, "opt": {"state": {4: moments["state"][0]}, "param_groups": [{"params": [0]}]}}, tmp_path / "orphan.pt"
    )
    with pytest.raises(FQNMismatchError, match=r"state of its parameter 4, which is in none of its groups"):
        migrate(tmp_path / "orphan.pt", tmp_path / "other", order=["a"])


def test_an_order_is_compared_with_the_checkpoints_own_names_where_no_model_is_given(tmp_path: Path) -> None:
    moments = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": {"module.norm.bias": torch.ones(2)}, "opt": moments}, tmp_path / "x.pt")
    with pytest.raises(FQNMismatchError, match=r"order names norm\.bia, but the checkpoint has no such parameter \(did you mean"):
        migrate(tmp_path / "x.pt", tmp_path / "new", order=["norm.bia"])
    migrate(tmp_path / "x.pt", tmp_path / "new", order=["module.norm.bias"])


@pytest.mark.parametrize("original", [True, False])
def test_one_ranks_file_alone_says_that_the_others_are_missing(tmp_path: Path, original: bool) -> None:
    groups = ORIGINAL_GROUPS if original else FLAT_GROUPS
    order = [name for group in ORIGINAL_GROUPS for name in group] if original else FLAT_NAMES
    save_local(tmp_path / "old", groups, original=original)
    for options in ({}, {"order": order}):
        with pytest.raises(IncompleteCheckpointError, match=r"The files of other ranks are missing\. Name the directory"):
            migrate(tmp_path / "old/ckpt_rank_0_of_2.pt", tmp_path / "new", model=Net, **options)


def test_the_help_says_how_to_write_the_order_and_what_it_says_runs() -> None:
    lines = CliRunner().invoke(command, ["migrate", "--help"]).output.splitlines()
    code = [line.strip() for line in lines if line.strip().startswith(("names = ", "print("))]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD([{"params": model[1].parameters()}, {"params": model[0].parameters()}])
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        exec("\n".join(code), {"model": model, "optimizer": optimizer})
    assert told.getvalue().split() == ["1.weight", "1.bias", "0.weight", "0.bias"]
