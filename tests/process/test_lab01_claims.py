"""Claims of notebook 01 about torch. If a new torch fails one of these tests, the sentence in the notebook is wrong too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import labkit
from labkit.spmd.model.initialize import build_model
from labkit.spmd.model.text import BatchSampler
from labkit.spmd.model.training import train
from labkit.spmd.model.transformer import Block, ModelConfig, Transformer, next_token_loss
from labkit.spmd.shards.parity import compare
from labkit.spmd.shards.records import Parity
from labkit.spmd.shards.sharding import shard_model
from tests.matrix import matrix

SIZES = {"dim": 16, "num_heads": 4, "hidden_dim": 24, "max_seq_len": 32}


@pytest.fixture(scope="module", params=matrix(2, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[labkit.WorkerPool]:
    with labkit.WorkerPool(request.param, device="cpu") as pool:
        yield pool


def sharded(seed: int = 0, num_layers: int = 2, hidden_dim: int = 24) -> Transformer:
    config = ModelConfig(**{**SIZES, "hidden_dim": hidden_dim}, num_layers=num_layers)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return shard_model(build_model(config, seed=seed), mesh, blocks=Block)


def batches() -> BatchSampler:
    return BatchSampler(batch_size=8, seq_len=16, rank=dist.get_rank(), world_size=dist.get_world_size())


def full_dict_after_set() -> tuple[str, str]:
    model = sharded()
    options = StateDictOptions(full_state_dict=True)
    full = get_model_state_dict(model, options=options)
    before = type(full["embed.weight"]).__name__
    set_model_state_dict(sharded(1), full, options=options)
    return before, type(full["embed.weight"]).__name__


def test_setting_a_full_state_replaces_the_tensors_in_the_caller_s_dict(pool: labkit.WorkerPool) -> None:
    assert pool.run(full_dict_after_set).same() == ("Tensor", "DTensor")


def early_optimizer() -> tuple[list[float], bool]:
    model = build_model(ModelConfig(**SIZES, num_layers=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    batch = next(batches())
    losses = []
    for _ in range(2):
        loss = next_token_loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, isinstance(model.embed.weight, DTensor)


def test_an_optimizer_built_before_fully_shard_trains_nothing_and_says_nothing(pool: labkit.WorkerPool) -> None:
    for losses, is_sharded in pool.run(early_optimizer).values():
        assert is_sharded
        assert losses[0] == losses[1]


def alias_and_clone() -> tuple[float, float]:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = get_model_state_dict(model)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    train(model, optimizer, batches(), 1)
    return compare(state, model).max_abs, compare(kept, model).max_abs


def test_a_state_dict_follows_the_model_and_a_clone_does_not(pool: labkit.WorkerPool) -> None:
    alias, clone = pool.run(alias_and_clone).same()
    assert alias == 0.0
    assert clone > 1e-3


def save(folder: str) -> None:
    model = sharded()
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), batches(), 1)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(full) == (dist.get_rank() == 0)
    if dist.get_rank() == 0:
        torch.save(full, f"{folder}/full.pt")
    dist.barrier()


def load(folder: str, num_layers: int = 2, hidden_dim: int = 24) -> tuple[str, Parity | None]:
    """Return DCP's error on this rank, and compare the loaded model with the saved one in the layers that both have."""
    model = sharded(1, num_layers, hidden_dim)
    try:
        dcp.load({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    except dcp.CheckpointException as error:
        return str(error.failures[0][0]), None
    full = torch.load(f"{folder}/full.pt")
    return "nothing", compare(model, full) if num_layers == 2 else None


@pytest.fixture
def saved(pool: labkit.WorkerPool, tmp_path: Path) -> Path:
    pool.run(save, str(tmp_path / "saved"))
    return tmp_path / "saved"


def test_an_intact_checkpoint_loads_without_a_setter(pool: labkit.WorkerPool, saved: Path) -> None:
    assert {path.name for path in saved.glob("*.distcp")} == {f"__{rank}_0.distcp" for rank in range(pool.world_size)}
    said, parity = pool.run(load, str(saved)).same()
    assert said == "nothing"
    assert parity, parity


def test_a_missing_table_and_a_missing_name_are_errors_and_so_is_another_shape(pool: labkit.WorkerPool, saved: Path) -> None:
    assert "Missing key in checkpoint state_dict: model.layers.2." in pool.run(load, str(saved), 3).same()[0]
    assert "size" in pool.run(load, str(saved), 2, 48).same()[0].lower()
    (saved / ".metadata").unlink()
    assert "metadata is None" in pool.run(load, str(saved)).same()[0]


def test_a_name_that_the_model_lacks_is_no_error(pool: labkit.WorkerPool, saved: Path) -> None:
    assert pool.run(load, str(saved), 1).same() == ("nothing", None)


def place_of(folder: str, name: str) -> tuple[str, int]:
    metadata = dcp.FileSystemReader(folder).read_metadata()
    piece = next(piece for index, piece in metadata.storage_data.items() if index.fqn == name)
    return piece.relative_path, piece.offset + piece.length // 8 * 4 + 3


def test_one_flipped_bit_loads_without_a_word_and_changes_one_weight(pool: labkit.WorkerPool, saved: Path) -> None:
    name, position = pool.run(place_of, str(saved), "model.layers.0.feed_forward.w1.weight")[0]
    data = bytearray((saved / name).read_bytes())
    data[position] ^= 1
    (saved / name).write_bytes(data)
    said, parity = pool.run(load, str(saved)).same()
    assert said == "nothing"
    assert parity is not None
    (difference,) = parity.differences
    assert difference.key == "layers.0.feed_forward.w1.weight"
    assert "1 of 384 elements differ" in difference.detail
    assert difference.max_abs is not None
    assert 0 < difference.max_abs < 1


def test_the_error_of_a_checkpoint_is_no_exception_that_except_exception_catches() -> None:
    assert not issubclass(dcp.CheckpointException, Exception)


def plain_values_after_load(folder: str) -> tuple[float, float]:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    train(model, optimizer, batches(), 1)
    _, moments = get_state_dict(model, optimizer)
    dcp.save({"optimizer": moments}, checkpoint_id=f"{folder}/optimizer")
    fresh = torch.optim.AdamW(model.parameters(), lr=0.1)
    _, moments = get_state_dict(model, fresh)
    first = next(iter(moments["state"].values()))["exp_avg"].to_local()
    before = first.clone()
    dcp.load({"optimizer": moments}, checkpoint_id=f"{folder}/optimizer")
    assert not torch.equal(first, before), "the tensors of the dict were to be filled in place"
    return fresh.param_groups[0]["lr"], moments["param_groups"][0]["lr"]


def test_loading_replaces_plain_values_in_the_dict_only(pool: labkit.WorkerPool, tmp_path: Path) -> None:
    in_optimizer, in_dict = pool.run(plain_values_after_load, str(tmp_path)).same()
    assert in_optimizer == 0.1
    assert in_dict == 0.5


def test_the_notebook_s_exact_sentences_are_still_in_it() -> None:
    notebook = json.loads((Path(__file__).parents[2] / "notebooks" / "01_composable_checkpointing.ipynb").read_text())
    text = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    for claim in ("Two of four are silent", "derives from `BaseException`", "in *your* dict", "only replaced *in the dict*"):
        assert claim in text, f"the notebook no longer says {claim!r}; drop or change its test in this file"
