"""The model of someone else: Hugging Face's own loading code at both ends, FSDP1 and FSDP2 between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from labkit import checkpoint
from labkit.checkpoint import migrate, verify
from tests.process.checkpoint_ranks import Launcher, launcher_fixture  # noqa: F401

pytest.importorskip("transformers", reason="needs the hf extra: pip install transformers")
tqdm = pytest.importorskip("tqdm")
tqdm.tqdm.monitor_interval = 0  # its monitor is a thread that never ends

TOKENS = torch.arange(24).reshape(2, 12) * 7 % 50


def config() -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )


def empty_model() -> torch.nn.Module:
    """The architecture alone, for migration: tied embeddings, buffers."""
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel(config())


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def old_run(rank: int, folder: str) -> list[float]:
    """Load a pretrained model as Hugging Face does, shard it with FSDP1, train two steps, save a file per rank."""
    from transformers import GPT2LMHeadModel
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    model = GPT2LMHeadModel.from_pretrained(f"{folder}/pretrained")
    wrapped = FSDP(model, device_id=torch.device("cpu"), use_orig_params=True, auto_wrap_policy=ModuleWrapPolicy({GPT2Block}))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    losses = [step(wrapped, optimizer) for _ in range(2)]
    with FSDP.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT):
        state = {"model": wrapped.state_dict(), "optim": FSDP.optim_state_dict(wrapped, optimizer)}
    torch.save(state, f"{folder}/old/state_rank{rank}.pt")
    dcp.save(state, checkpoint_id=f"{folder}/truth")
    with torch.no_grad():
        logits = wrapped(input_ids=TOKENS).logits
    if rank == 0:
        torch.save(logits, f"{folder}/logits.pt")
    return [*losses, *(step(wrapped, optimizer) for _ in range(2))]


def new_run(rank: int, folder: str) -> Any:
    """Load the migrated state on other ranks under FSDP2 and go on."""
    model = empty_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    checkpoint.load(f"{folder}/new", {"model": model, "optim": optimizer})
    # Before the forward pass: after it, the root's parameters are the unsharded ones.
    moments = {name: value.full_tensor() for name, value in _moments(model, optimizer)}
    with torch.no_grad():
        logits = model(input_ids=TOKENS).logits
    same = torch.equal(logits, torch.load(f"{folder}/logits.pt", weights_only=True))
    return same, moments, [step(model, optimizer) for _ in range(2)]


def _moments(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    for name, parameter in model.named_parameters():
        for piece in ("exp_avg", "exp_avg_sq"):
            yield f"optim.state.{name}.{piece}", optimizer.state[parameter][piece]


@pytest.mark.timeout(300)
def test_a_pretrained_model_goes_from_fsdp1_to_fsdp2_and_back_to_its_own_library(launcher: Launcher, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    (tmp_path / "old").mkdir()
    empty_model().save_pretrained(tmp_path / "pretrained")
    losses = launcher.run(old_run, 2, tmp_path, str(tmp_path), timeout_s=120)[0]
    migrate(tmp_path / "old", tmp_path / "new", model=empty_model())
    findings = verify(tmp_path / "new", against=tmp_path / "truth").findings
    assert [f.line() for f in findings if (f.code, f.where) != ("missing-key", "lm_head.weight")] == []
    results = launcher.run(new_run, 3, tmp_path, str(tmp_path), timeout_s=120)
    with checkpoint.Reader(checkpoint.open_checkpoint(tmp_path / "truth")) as reader:
        for same, moments, _ in results:
            assert same
            assert all(torch.equal(value, reader.tensor(name)) for name, value in moments.items())
    # Every rank sees the same data, so losses agree whatever the number of ranks, up to the order of the sums.
    assert torch.allclose(torch.tensor(results[0][2]), torch.tensor(losses[2:]), rtol=1e-5)
    (tmp_path / "exported").mkdir()
    config().save_pretrained(tmp_path / "exported")
    migrate(tmp_path / "new", tmp_path / "exported/model.safetensors", model=empty_model())
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "exported").eval()
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    with torch.no_grad():
        assert torch.equal(theirs(input_ids=TOKENS).logits, torch.load(tmp_path / "logits.pt", weights_only=True))
