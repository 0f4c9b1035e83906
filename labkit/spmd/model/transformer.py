"""The one model of the course: a small decoder-only transformer over bytes, written to be read.

Every lab trains, shards, offloads or migrates this model. The blocks are those of Llama (Touvron et al., 2023,
arXiv:2302.13971): RMSNorm before each half, rotary position embedding, SwiGLU. The projections are separate modules, so that
a tensor-parallel plan can name them: split ``wq wk wv w1 w3`` by rows, ``wo w2`` by columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model. ``num_heads`` divides ``dim``; for tensor parallelism, the number of ranks divides ``num_heads``."""

    vocab_size: int = 256
    dim: int = 64
    num_layers: int = 3
    num_heads: int = 4
    hidden_dim: int = 192
    max_seq_len: int = 128
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.dim % (2 * self.num_heads):
            raise ValueError(f"dim {self.dim} does not give each of {self.num_heads} heads an even width, which rotation needs")


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.dim, bias=False)
        self.wv = nn.Linear(config.dim, config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, seq, dim) to the same shape."""
        # -1 instead of num_heads, because under tensor parallelism a rank computes only its own heads.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU: a gated hidden layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, dim) to the same shape."""
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """One layer, and the unit that the labs shard, checkpoint and offload."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, seq, dim) to the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Transformer(nn.Module):
    """The whole model. ``head.weight`` is ``embed.weight``: one parameter under two names.

    The rotary tables are persistent buffers, so they are part of the state dict.
    """

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        cos, sin = rotary_tables(config, device=self.embed.weight.device)
        self.register_buffer("rope_cos", cos)
        self.register_buffer("rope_sin", sin)
        self.tie_weights()

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 tokens (batch, seq) to logits (batch, seq, vocab_size)."""
        seq_len = tokens.shape[1]
        if seq_len > self.config.max_seq_len:
            raise ValueError(f"{seq_len} tokens are more than the {self.config.max_seq_len} positions that the rotary tables hold")
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x, self.rope_cos[:seq_len], self.rope_sin[:seq_len])
        logits: Tensor = self.head(self.norm(x))
        return logits

    def tie_weights(self) -> None:
        """Make the head use the embedding's parameter. ``to_empty`` on a meta model silently unties them."""
        self.head.weight = self.embed.weight


def next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats per byte, of ``batch[:, 1:]`` given ``batch[:, :-1]`` (int64, (batch, seq + 1))."""
    logits: Tensor = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def rotary_tables(config: ModelConfig, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return cosine and sine of position times frequency, each (max_seq_len, head_dim / 2) (Su et al., 2021, arXiv:2104.09864)."""
    half = config.dim // config.num_heads // 2
    frequency = config.rope_base ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
    angle = torch.arange(config.max_seq_len, device=device, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of features of (batch, heads, seq, head_dim) by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
