from __future__ import annotations

import pytest
import torch

from labkit.spmd.model.initialize import build_model, init_weights
from labkit.spmd.model.text import BatchSampler
from labkit.spmd.model.training import train
from labkit.spmd.model.transformer import ModelConfig, next_token_loss, rotary_tables, rotate


def test_the_same_seed_gives_the_same_model_whatever_was_drawn_before() -> None:
    first = build_model(seed=7)
    torch.manual_seed(1)
    torch.randn(100)
    again = build_model(seed=7)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in first.state_dict().items())


def test_another_seed_gives_other_weights() -> None:
    assert not torch.equal(build_model(seed=0).embed.weight, build_model(seed=1).embed.weight)


def test_a_deeper_model_keeps_the_shallow_model_s_first_layer() -> None:
    shallow, deep = build_model(ModelConfig(num_layers=1)), build_model(ModelConfig(num_layers=2))
    assert torch.equal(shallow.layers[0].attention.wq.weight, deep.layers[0].attention.wq.weight)


def test_a_meta_model_holds_nothing_until_it_is_materialised() -> None:
    model = build_model(device="meta", seed=3)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    with pytest.raises(RuntimeError, match="meta"):
        init_weights(model, seed=3)
    model.to_empty(device="cpu")
    init_weights(model, seed=3)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in build_model(seed=3).state_dict().items())


def test_the_head_is_the_embedding_also_after_to_empty() -> None:
    model = build_model(device="meta")
    model.to_empty(device="cpu")
    init_weights(model, seed=0)
    assert model.head.weight is model.embed.weight


def test_the_default_model_has_the_documented_number_of_parameters() -> None:
    assert sum(parameter.numel() for parameter in build_model().parameters()) == 176_576


def test_every_buffer_is_saved_and_none_is_zero() -> None:
    model = build_model()
    assert {"rope_cos", "rope_sin"} <= model.state_dict().keys()
    assert all(bool(buffer.count_nonzero()) for buffer in model.buffers())


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    cos, sin = rotary_tables(ModelConfig())
    query, key = torch.randn(2, 1, 1, 1, 16)
    every = [(rotate(query.expand(1, 1, 128, 16), cos, sin), rotate(key.expand(1, 1, 128, 16), cos, sin))]
    q, k = every[0]
    assert torch.allclose(q.norm(dim=-1), query.norm(dim=-1), rtol=1e-5)
    near = (q[..., 5, :] * k[..., 3, :]).sum()
    far = (q[..., 105, :] * k[..., 103, :]).sum()
    assert torch.allclose(near, far, rtol=1e-3, atol=1e-4)


def test_a_token_sees_no_later_token() -> None:
    model = build_model()
    tokens = torch.randint(256, (1, 20), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 12:] = (changed[0, 12:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.equal(before[:, 12:], after[:, 12:])


def test_training_on_text_lowers_the_loss() -> None:
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train(model, optimizer, BatchSampler(batch_size=12, seq_len=64), 12)
    assert losses[0] == pytest.approx(5.5, abs=0.3)  # close to log(256), the loss of a model that knows nothing
    assert losses[-1] < losses[0] - 1.0
    assert train(model, optimizer, BatchSampler(batch_size=12, seq_len=64), 0) == []


def test_a_sequence_longer_than_the_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="130 tokens are more than the 128 positions"):
        next_token_loss(build_model(), torch.zeros(1, 131, dtype=torch.int64))


def test_heads_of_odd_width_are_refused() -> None:
    with pytest.raises(ValueError, match="even width"):
        ModelConfig(dim=60, num_heads=4)
