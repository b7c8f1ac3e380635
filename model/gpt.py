"""A plain GPT: GPT-2-style and Llama-style from the same few fields.

Nothing in this file knows about recompute, offload, tiles or parallelism: those are applied from outside
(model/recompute.py, model/tiling.py) by exchanging the `forward` of the modules named here.
"""

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin

import torch
import torch.nn.functional as F
from torch import nn

from model.attention import CoreAttention
from model.rowwise import RMSNorm, rope_table, rotate

IGNORED = -100  # target value of a position where nothing is to be predicted


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT; names follow Megatron-LM where it has one."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    num_query_groups: int | None = None  # key/value heads (GQA); None: one per attention head
    ffn_hidden_size: int | None = None  # None: 4 * hidden_size
    max_position_embeddings: int | None = None  # rows of the learned position table
    normalization: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    position_embedding: Literal["learned", "rope"] = "rope"
    activation: Literal["gelu", "swiglu"] = "swiglu"
    bias: bool = False  # of projections and of layer norms
    tied_embeddings: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5
    attention: Literal["unfused", "sdpa", "flash_attn"] = "sdpa"
    init_std: float = 0.02
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        def require(name: str, holds: bool, expected: str) -> None:
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {expected}")

        for field in fields(self):
            value, kind = getattr(self, field.name), field.type
            if get_origin(kind) is Literal:
                require(field.name, value in get_args(kind), f"one of {', '.join(get_args(kind))}")
            elif kind is int or (kind == int | None and value is not None):
                require(field.name, type(value) is int and value > 0, "a whole number above 0")
        for name in ("hidden_dropout", "attention_dropout", "label_smoothing"):
            require(name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        for name in ("rope_theta", "norm_epsilon", "init_std"):
            require(name, 0 < getattr(self, name) < math.inf, "above 0")
        require("z_loss", 0 <= self.z_loss < math.inf, "at least 0")
        heads, groups = self.num_attention_heads, self.query_groups
        require("hidden_size", self.hidden_size % heads == 0, f"divisible by num_attention_heads={heads}")
        require("num_attention_heads", heads % groups == 0, f"divisible by num_query_groups={groups}")
        if self.position_embedding == "rope" and self.head_dim % 2:
            raise ValueError(f"rope needs an even head size, not {self.head_dim} (hidden_size / heads)")
        if self.position_embedding == "learned" and self.max_position_embeddings is None:
            raise ValueError("position_embedding=learned needs max_position_embeddings (rows of its table)")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size


def num_parameters(config: GPTConfig) -> int:
    """Trainable parameters, a tied head counted once."""
    c, b = config, config.bias
    h, f, kv = c.hidden_size, c.ffn_size, c.query_groups * c.head_dim
    norm = h * (2 if c.normalization == "layernorm" and b else 1)
    attention = 2 * h * (h + kv) + b * (2 * h + 2 * kv)
    mlp = 2 * h * f + b * (f + h) + (c.activation == "swiglu") * (h * f + b * f)
    embeddings = c.vocab_size * h * (1 if c.tied_embeddings else 2)
    if c.position_embedding == "learned":
        embeddings += (c.max_position_embeddings or 0) * h
    return c.num_layers * (attention + mlp + 2 * norm) + norm + embeddings


def flops_per_token(config: GPTConfig, seq_length: int) -> float:
    """Model FLOPs of forward + backward for one token, without any recompute.

    6 per matmul weight (2 forward, 4 backward), plus 12 * L * h * s for the attention scores and context
    (PaLM, arXiv:2204.02311, appendix B), of which causal attention needs half of the square: 6 * L * h * s.
    """
    c = config
    h, kv = c.hidden_size, c.query_groups * c.head_dim
    mlp = (3 if c.activation == "swiglu" else 2) * h * c.ffn_size
    weights = c.num_layers * (2 * h * (h + kv) + mlp) + c.vocab_size * h
    return 6.0 * weights + 6.0 * c.num_layers * h * seq_length


class Attention(nn.Module):
    """Causal self-attention around a core (scores, softmax, dropout, context)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv = config.query_groups * config.head_dim
        self.query = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)
        # Not one fused projection: v would be a view that keeps the unrotated q and k alive until backward.
        self.key = nn.Linear(config.hidden_size, kv, bias=config.bias)
        self.value = nn.Linear(config.hidden_size, kv, bias=config.bias)
        self.core_attention = CoreAttention(config.attention, config.attention_dropout)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        q = self.query(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H, D)
        k = self.key(x).unflatten(-1, (-1, self.head_dim))  # (B, T, G, D)
        v = self.value(x).unflatten(-1, (-1, self.head_dim))  # (B, T, G, D)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        context = self.core_attention(q, k, v)  # (B, T, H, D)
        return self.out(context.flatten(-2))  # (B, T, C)


class Activation(nn.Module):
    """GELU (tanh form, as GPT-2) or the gated half of SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def forward(self, up: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return F.gelu(up, approximate="tanh") if gate is None else F.silu(gate) * up


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        gated = config.activation == "swiglu"
        self.gate = nn.Linear(config.hidden_size, config.ffn_size, bias=config.bias) if gated else None
        self.up = nn.Linear(config.hidden_size, config.ffn_size, bias=config.bias)
        self.activation = Activation()
        self.down = nn.Linear(config.ffn_size, config.hidden_size, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = () if self.gate is None else (self.gate(x),)
        return self.down(self.activation(self.up(x), *gate))  # (B, T, F) inside, (B, T, C) out


def make_norm(config: GPTConfig) -> nn.Module:
    if config.normalization == "layernorm":
        return nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon, bias=config.bias)
    return RMSNorm(config.hidden_size, eps=config.norm_epsilon)


class Block(nn.Module):
    """Pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.input_norm = make_norm(config)
        self.attention = Attention(config)
        self.post_norm = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        x = self.residual(x, self.attention(self.input_norm(x), rope))  # (B, T, C)
        return self.residual(x, self.mlp(self.post_norm(x)))  # (B, T, C)

    def residual(self, x: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        if self.training and self.dropout:
            update = F.dropout(update, self.dropout)
        return x + update


class LossHead(nn.Module):
    """Projection to the vocabulary and the cross entropy over it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.label_smoothing = config.label_smoothing
        self.z_loss = config.z_loss

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight)  # (B, T, V): the big one

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, denominator: torch.Tensor | float | None = None
    ) -> torch.Tensor:
        logits = self.logits(hidden).flatten(0, -2).float()  # (B * T, V)
        targets = targets.flatten()
        loss = F.cross_entropy(
            logits, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=self.label_smoothing
        )
        if self.z_loss:  # PaLM, section 5: keeps log Z near 0
            loss = loss + self.z_loss * (logits.logsumexp(-1).square() * (targets != IGNORED)).sum()
        return loss / loss_denominator(targets, denominator)


def loss_denominator(targets: torch.Tensor, denominator: torch.Tensor | float | None) -> torch.Tensor | float:
    """What a summed loss is divided by: the given number, or the predicted tokens of `targets` (at least 1)."""
    return (targets != IGNORED).sum().clamp(min=1) if denominator is None else denominator


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = (
            nn.Embedding(config.max_position_embeddings or 0, config.hidden_size)
            if config.position_embedding == "learned"
            else None
        )
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = make_norm(config)
        self.head = LossHead(config)
        if config.tied_embeddings:
            self.embedding.weight = self.head.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's initialisation: normal, and the projections into the residual stream scaled by 1/sqrt(2L)."""
        std = self.config.init_std
        for name, p in self.named_parameters():
            if p.dim() == 1:
                nn.init.constant_(p, 1.0 if name.endswith("norm.weight") else 0.0)
            elif name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(p, std=std / math.sqrt(2 * self.config.num_layers))
            else:
                nn.init.normal_(p, std=std)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor, denominator: torch.Tensor | float | None = None
    ) -> torch.Tensor:
        """Cross entropy of predicting `targets` from `tokens`, in nats.

        tokens, targets: int64 [B, T]; a target of -100 is not predicted. `denominator` None gives the mean over
        the predicted tokens of this call (0 when there are none), else the sum over them divided by it, which
        weighs every token alike when a step is cut into micro-batches and ranks. Returns a scalar, float32.
        """
        return self.head(self.hidden(tokens), targets, denominator)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Next-token logits [B, T, V] for `tokens`, int64 [B, T]."""
        return self.head.logits(self.hidden(tokens))

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        seq_length = tokens.shape[-1]
        x = self.embedding(tokens)  # (B, T, C)
        rope = None
        if self.position_embedding is not None:
            rows = self.position_embedding.num_embeddings
            if seq_length > rows:
                raise ValueError(f"{seq_length} tokens, but max_position_embeddings is {rows}")
            x = x + self.position_embedding(torch.arange(seq_length, device=tokens.device))
        else:
            rope = rope_table(seq_length, self.config.head_dim, self.config.rope_theta, x.device)
        if self.training and self.config.hidden_dropout:
            x = F.dropout(x, self.config.hidden_dropout)
        return self.norm(self.run_layers(x, rope))  # (B, T, C)

    def run_layers(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, rope)
        return x
