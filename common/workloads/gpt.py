"""A decoder-only transformer of the Llama family: RMSNorm, rotary positions, SwiGLU, grouped heads, no biases.

Every part is optional, so that a strategy can divide the layers over ranks: their names stay the same, and each rank
computes the parts it has.
"""

import dataclasses
import math

import torch
from torch import nn
from torch.nn import functional as F

from common import UserError

INIT_STD = 0.02
MOST_LAYERS = 10_000  # which take 10 s to create, before any weights
MOST_ELEMENTS = 2**40  # of a matrix: 4 TB


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model, and constants of its layers."""

    vocab_size: int
    num_layers: int
    num_heads: int  # query heads
    width: int  # of the residual stream
    num_kv_heads: int = 0  # key and value heads; 0 for num_heads
    mlp_width: int = 0  # hidden units of each MLP; 0 for 8/3 of `width`, rounded up to a multiple of 64
    tied: bool = False  # whether the output layer shares the embedding's weights
    rope_base: float = 10_000.0  # longest wavelength of the rotary positions, as a multiple of 2 pi tokens
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        """Fill in the default sizes, and refuse sizes that do not divide."""
        object.__setattr__(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        object.__setattr__(self, "mlp_width", self.mlp_width or -(-8 * self.width // (3 * 64)) * 64)
        if self.width % (2 * self.num_heads):
            raise UserError(f"--width {self.width} must be an even multiple of --num-heads {self.num_heads}")
        if self.num_layers > MOST_LAYERS:
            raise UserError(f"--num-layers {self.num_layers} must be at most {MOST_LAYERS}")
        if self.width * max(self.width, self.mlp_width, self.vocab_size) > MOST_ELEMENTS:
            raise UserError(
                f"--width {self.width} with --mlp-width {self.mlp_width} makes a matrix of more than {MOST_ELEMENTS} "
                "elements: lower one of them"
            )
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"--num-heads {self.num_heads} must be a multiple of --num-kv-heads {self.num_kv_heads}")


def rotate(x: torch.Tensor, base: float) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), in halves, as in Llama's files.

    Args:
        x: (B, heads, T, D); the first and the second half of D are the parts of D / 2 complex numbers.
        base: see `Shape.rope_base`.
    """
    angle_dtype = torch.promote_types(x.dtype, torch.float32)
    length = x.shape[2]
    half = x.shape[3] // 2
    frequencies = base ** (-torch.arange(half, device=x.device, dtype=angle_dtype) / half)
    angles = torch.arange(length, device=x.device, dtype=angle_dtype)[:, None] * frequencies  # (T, D / 2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    real, imaginary = x.chunk(2, dim=3)
    return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], dim=3)


class Attention(nn.Module):
    """Causal self-attention. The weights' shapes decide the number of heads, because a rank may hold only some."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.num_heads
        self.rope_base = shape.rope_base
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.num_kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(shape.width, shape.num_kv_heads * self.head_width, bias=False)
        self.output = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, T, C) to (B, T, C)."""
        heads = [linear(x).unflatten(2, (-1, self.head_width)) for linear in (self.query, self.key, self.value)]
        query, key, value = (part.transpose(1, 2) for part in heads)  # (B, heads, T, D)
        query, key = rotate(query, self.rope_base), rotate(key, self.rope_base)
        grouped = query.shape[1] != key.shape[1]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.up = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.down = nn.Linear(shape.mlp_width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, T, C) to (B, T, C)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention and MLP each read the residual stream through a norm, and add their result to it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, shape.norm_eps)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, T, C) to (B, T, C)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """The model, or some of its layers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed: nn.Embedding | None = nn.Embedding(shape.vocab_size, shape.width)
        self.blocks = nn.ModuleDict({str(i): Block(shape) for i in range(shape.num_layers)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(shape.width, shape.norm_eps)
        self.head = None if shape.tied else nn.Linear(shape.width, shape.vocab_size, bias=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (B, T, vocab_size) of tokens (B, T), or with targets (B, T) the loss of each sequence, (B,).

        A part without the embedding takes the residual stream (B, T, C); a part without the last norm returns it.
        """
        if not x.is_floating_point():
            assert self.embed is not None
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        if self.norm is None:
            return x
        output = self.embed if self.head is None else self.head
        assert output is not None
        logits = F.linear(self.norm(x), output.weight)
        return logits if targets is None else sequence_losses(logits, targets)

    def initial(self, name: str, size: torch.Size, generator: torch.Generator) -> torch.Tensor:
        """Initial value of a parameter: normal, narrower if its layer adds to the stream (Radford et al. 2019)."""
        if name.endswith("norm.weight"):
            return torch.ones(size)
        adds = name.endswith(("attention.output.weight", "mlp.down.weight"))
        std = INIT_STD / math.sqrt(2 * self.shape.num_layers) if adds else INIT_STD
        return torch.empty(size).normal_(0, std, generator=generator)


def sequence_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each sequence in nats, (B,), from logits (B, T, V); targets of -100 count as loss 0."""
    float_logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(float_logits, targets.flatten(), reduction="none").view(targets.shape).mean(1)


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of the losses of a batch's sequences, ()."""
    return sequence_losses(logits, targets).sum()
