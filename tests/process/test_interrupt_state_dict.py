"""A sharded model's state_dict that is cut off leaves no trace: the model trains on, and its next state_dict is complete."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from labkit import WorkerPool
from labkit.errors import RunReport

MODEL = """
import torch, torch.distributed as dist, warnings
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType, FullStateDictConfig, fully_shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
warnings.simplefilter("ignore", FutureWarning)
torch.manual_seed(0)
def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
def saved(kind):
    if kind == "FSDP2":
        return get_model_state_dict(models[kind], options=StateDictOptions(full_state_dict=True))
    config = FullStateDictConfig(offload_to_cpu=False) if kind == "FULL_STATE_DICT" else None
    with FSDP.state_dict_type(models[kind], StateDictType[kind], config):
        return models[kind].state_dict()
class Boom(RuntimeError):
    pass
def boom(module, *args):
    if rank == 1:
        raise Boom("boom")
KINDS = "FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"
models = {kind: FSDP(build(), device_id=device, use_orig_params=kind != "LOCAL_STATE_DICT") for kind in KINDS}
models["FSDP2"] = build()
_ = fully_shard(models["FSDP2"])
optimizers = {kind: torch.optim.SGD(model.parameters(), lr=0.01) for kind, model in models.items()}
def step(kind):
    loss = models[kind](torch.ones(2, 8)).square().sum()
    loss.backward()
    optimizers[kind].step()
    optimizers[kind].zero_grad()
    return float(loss.detach())
first = {kind: step(kind) for kind in models}
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2, device="cpu", replace=True) as pool:
        pool.run_cell(MODEL, timeout_s=60)
        yield pool


CUTS = {
    "raises": "hook = inner._register_state_dict_hook(boom)\ntry:\n    saved(kind)\nfinally:\n    hook.remove()",
    "missing": "if rank == 0:\n    saved(kind)",
}
# Nothing of these two is exchanged between ranks, or one rank cannot be missed.
ROWS = [
    ("FULL_STATE_DICT", "raises"),
    ("FULL_STATE_DICT", "missing"),
    ("SHARDED_STATE_DICT", "raises"),
    ("LOCAL_STATE_DICT", "raises"),
    ("FSDP2", "missing"),
]


@pytest.mark.parametrize(("kind", "cut"), ROWS)
def test_a_state_dict_that_is_cut_leaves_no_trace(pool: WorkerPool, kind: str, cut: str) -> None:
    pool.push(kind=kind)
    pool.run_cell("inner = getattr(models[kind], 'module', models[kind])[0]")
    before = pool.run_cell("{name: str(value) for name, value in saved(kind).items()}", want_value=True, timeout_s=60)
    with pytest.raises(RunReport):
        pool.run_cell(CUTS[cut], timeout_s=1.5 if cut == "missing" else 60)
    after = pool.run_cell("{name: str(value) for name, value in saved(kind).items()}", want_value=True, timeout_s=60)
    assert after == before
    losses = pool.run_cell("[step(kind) for _ in range(2)]", want_value=True, timeout_s=60)
    assert losses is not None
    assert all(second < first for first, second in losses.values())
