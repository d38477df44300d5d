"""A decoder-only transformer of the Llama family: RMSNorm, rotary positions, SwiGLU, grouped heads.

With `Shape`'s options it is a Llama, a Mistral, a Qwen 2 or a Qwen 3: `gpt_names` has their names.

Every part is optional, so that a strategy can divide the layers over ranks: their names stay the same, and each rank
computes the parts it has.
"""

import contextlib
import functools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint

from common import UserError, precision, seed
from common.workloads import gpt_names, private_api
from common.workloads.gpt_shape import Shape, ShapeArgs, parse_scaling  # noqa: F401 (recipes take both from here)

INIT_STD = 0.02
Recompute = Literal["none", "selective", "full"]
KEPT = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm")  # products of matrices
# Tokens of a text up to which a CPU that computes in bfloat16 attends by the definition (docs/measured/attention.md).
WRITTEN_OUT = 512 if precision.has_bfloat16(torch.device("cpu")) else 0
FLOAT_LOGITS = 2**29  # that are computed with in float32 at a time: 2 GiB


def scale_frequencies(frequencies: torch.Tensor, scaling: list[float]) -> torch.Tensor:
    """Stretch rotary positions, so that a model reads longer texts than it was first trained on.

    "linear" (Chen et al. 2023, https://arxiv.org/abs/2306.15595) divides all frequencies by the factor. "llama3", as
    transformers computes Llama 3.1's, divides those that turn less than LOW times in the first CONTEXT tokens, leaves
    those that turn more than HIGH times, and mixes in between.

    Args:
        frequencies: of each pair, in radians a token, (D / 2,).
        scaling: what `parse_scaling` returns.
    """
    if not scaling:
        return frequencies
    slow = frequencies / scaling[0]
    if len(scaling) == 1:
        return slow
    _, low, high, context = scaling
    turns = context * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * slow + kept * frequencies


def rotations(length: int, shape: Shape, like: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    """Cosines and sines of the rotary positions (Su et al. 2021, https://arxiv.org/abs/2104.09864), (2, T, D / 2).

    Args:
        length: T.
        shape: of the model.
        like: on whose device; in a wider type if its own has fewer digits than float32.
        positions: of the tokens in their texts, (T,) or (B, T); None for 0 to T - 1.

    Returns:
        For positions (B, T): (2, B, 1, T, D / 2).
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    half = shape.head_width // 2
    # Rounded as transformers rounds it: far from the start of a text, the angles would differ.
    frequencies = 1 / shape.rope_base ** (torch.arange(half, device=like.device, dtype=dtype) / half)
    frequencies = scale_frequencies(frequencies, parse_scaling(shape.rope_scaling))
    if positions is None:
        positions = torch.arange(length, device=like.device, dtype=dtype)
    angles = positions[..., None] * frequencies
    angles = angles.unsqueeze(1) if angles.ndim == 3 else angles  # the same for all heads
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Turn queries or keys by their rotary positions, in halves, as in Llama's files.

    Args:
        x: (B, heads, T, D); the first and the second half of D are the parts of D / 2 complex numbers.
        turns: what `rotations` returns.
    """
    cos, sin = turns.to(x.dtype)
    real, imaginary = x.chunk(2, dim=3)
    return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], dim=3)


class Places(NamedTuple):
    """Where tokens stand."""

    turns: torch.Tensor  # `rotations`
    documents: tuple[torch.Tensor, ...] = ()  # one, if they are kept apart: number of each token's in its row, (B, T)


def documents_of(positions: torch.Tensor) -> torch.Tensor:
    """Number of each token's document, (B, T), from their positions in their documents, which begin at 0."""
    return (positions == 0).cumsum(1)


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: torch.Tensor | None = None
) -> torch.Tensor:
    """What each query reads of the values of its own document, up to its own position, (B, heads, T, D).

    In bfloat16 on a CPU, torch's operator is slow in the backward pass. The definition is faster for short texts, and
    as exact; for long ones, all T x T scores take too much memory.

    Args:
        query: (B, heads, T, D).
        key: (B, kv heads, T, D); each head of keys and values serves equally many heads of queries.
        value: the same shape.
        documents: number of each token's document, (B, T); None for one document.
    """
    grouped = query.shape[1] != key.shape[1]
    if documents is not None and query.is_cuda:
        return private_api.document_attention(query, key, value, documents)
    written_out = query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.shape[2] <= WRITTEN_OUT
    if documents is None and not written_out:
        if query.is_cuda and not private_api.has_flash(query):
            # Of the operators of GPUs, only this one takes grouped heads. For others, torch would keep T x T scores.
            key, value = (private_api.for_each_query(x, query) for x in (key, value))
            grouped = False
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    unseen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).triu(1)
    if documents is not None:
        unseen = unseen | (documents[:, None, :, None] != documents[:, None, None, :])  # (B, 1, T, T)
    if written_out:
        key, value = (private_api.for_each_query(x, query) for x in (key, value))
        return (query * query.shape[3] ** -0.5 @ key.mT).masked_fill(unseen, -torch.inf).softmax(3) @ value
    return F.scaled_dot_product_attention(query, key, value, attn_mask=~unseen, enable_gqa=grouped)


class Attention(nn.Module):
    """Causal self-attention. The weights' shapes decide the number of heads, because a rank may hold only some.

    A strategy whose ranks hold parts of each sequence puts its own function in the place of `attend`.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.head_width
        self.attend: Callable[..., torch.Tensor] = causal_attention
        self.query = nn.Linear(shape.width, shape.num_heads * shape.head_width, bias=shape.qkv_bias)
        self.key = nn.Linear(shape.width, shape.num_kv_heads * shape.head_width, bias=shape.qkv_bias)
        self.value = nn.Linear(shape.width, shape.num_kv_heads * shape.head_width, bias=shape.qkv_bias)
        self.query_norm = nn.RMSNorm(shape.head_width, shape.norm_eps) if shape.qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(shape.head_width, shape.norm_eps) if shape.qk_norm else nn.Identity()
        self.output = nn.Linear(shape.num_heads * shape.head_width, shape.width, bias=False)

    def forward(self, x: torch.Tensor, places: Places) -> torch.Tensor:
        """Map (B, T, C) to (B, T, C)."""
        heads = [linear(x).unflatten(2, (-1, self.head_width)) for linear in (self.query, self.key, self.value)]
        query, key = self.query_norm(heads[0]), self.key_norm(heads[1])  # (B, T, heads, D)
        query, key, value = (part.transpose(1, 2) for part in (query, key, heads[2]))  # (B, heads, T, D)
        query, key = rotate(query, places.turns), rotate(key, places.turns)
        return self.output(self.attend(query, key, value, *places.documents).transpose(1, 2).flatten(2))


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

    def forward(self, x: torch.Tensor, places: Places) -> torch.Tensor:
        """Map (B, T, C) to (B, T, C)."""
        x = x + self.attention(self.attention_norm(x), places)
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
        self.part: int | None = None  # which one this is, where ranks hold other layers or tokens of the same samples

    def forward(
        self,
        x: torch.Tensor,
        targets: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits (B, T, vocab_size) of tokens (B, T), or with targets (B, T) the loss of each sequence, (B,).

        A part without the embedding takes the residual stream (B, T, C), in any type; a part without the last norm
        returns it, in the parameters' type.

        Args:
            x: tokens, (B, T); with documents that are kept apart, (B, 2, T): tokens, and their positions.
            targets: the next tokens, (B, T).
            positions: of the tokens in their sequences, (T,), or in their documents, (B, T); None for 0 to T - 1.
            documents: number of each token's document, (B, T), if this part has not the whole sequences to count them.
        """
        if x.ndim == 3 and not x.is_floating_point():
            x, positions = x.unbind(1)
        if documents is None and positions is not None and positions.ndim == 2:
            documents = documents_of(positions)
        if self.part is None or not self.training:
            return self._compute(x, targets, positions, documents)
        with draws_of(self.part):
            return self._compute(x, targets, positions, documents)

    def _compute(
        self,
        x: torch.Tensor,
        targets: torch.Tensor | None,
        positions: torch.Tensor | None,
        documents: torch.Tensor | None,
    ) -> torch.Tensor:
        length = x.shape[1]  # of the whole sequences; after the embedding, a rank may have a part of each
        if x.is_floating_point():
            x = x.to(next((parameter.dtype for parameter in self.parameters()), x.dtype))
        else:
            assert self.embed is not None
            x = self.embed(x)
        # Once, for the queries and keys of all blocks.
        places = Places(rotations(length, self.shape, x, positions), () if documents is None else (documents,))
        for block in self.blocks.values():
            x = block(x, places)
        if self.norm is None:
            return x
        output = self.embed if self.head is None else self.head
        assert output is not None
        logits = F.linear(self.norm(x), output.weight)
        return logits if targets is None else sequence_losses(logits, targets)

    def names_in(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Our names of the tensors in a Hugging Face folder, by theirs.

        Args:
            config: what its config.json holds.

        Raises:
            UserError: that model computes something else than this one; names the flags that would be right.
        """
        gpt_names.check_flags(vars(self.shape), vars(Shape(**gpt_names.from_config(config))))
        return {theirs: ours for ours, theirs in gpt_names.names(self.shape).items()}

    def initial(self, name: str, size: torch.Size, generator: torch.Generator) -> torch.Tensor:
        """Initial value of a matrix: normal, narrower if its layer adds to the stream (Radford et al. 2019)."""
        if name.endswith("norm.weight"):
            return torch.ones(size)
        if name.endswith(".bias"):
            return torch.zeros(size)
        adds = name.endswith(("attention.output.weight", ".down.weight"))  # the latter of an MLP, or of an expert
        std = INIT_STD / math.sqrt(2 * self.shape.num_layers) if adds else INIT_STD
        return torch.empty(size).normal_(0, std, generator=generator)


@contextlib.contextmanager
def draws_of(part: int) -> Iterator[None]:
    """Let each part of a divided model draw random numbers of its own, such as dropout's masks.

    Ranks that share samples are seeded alike: what is drawn around the model is the same on all of them, before and
    after. Each call draws other numbers, by Python's generator, which needs no tensor: the planner has fake ones.
    """
    bits = seed.mix_ints(random.getrandbits(62), part)
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        torch.default_generator.manual_seed(bits)
        if torch.cuda.is_available():
            torch.cuda.manual_seed(bits)
        yield


def recompute(model: Any, what: Recompute) -> None:
    """Let each block keep less for its backward pass, which computes the rest again.

    Args:
        model: with `blocks`, an nn.ModuleDict of its layers; nothing may copy it afterwards.
        what: "full" keeps a block's input alone (Chen et al. 2016, https://arxiv.org/abs/1604.06174). "selective" also
            keeps what takes long to compute: the results of matrix products and of attention.

    Raises:
        UserError: the model has no blocks.
    """
    if what == "none":
        return
    if not hasattr(model, "blocks"):
        raise UserError(f"--recompute {what} needs a model with `blocks`, an nn.ModuleDict of its layers")
    selective = functools.partial(checkpoint.create_selective_checkpoint_contexts, _what_to_keep)
    how: dict[str, Any] = {"context_fn": selective} if what == "selective" else {}
    for block in model.blocks.values():
        # No layer here draws random numbers; dropout that somebody adds has to draw the same ones again.
        block.forward = functools.partial(checkpoint.checkpoint, block.forward, use_reentrant=False, **how)


def _what_to_keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> checkpoint.CheckpointPolicy:
    name = operation.name().partition(".")[0]
    kept = name in KEPT or "scaled_dot_product" in name
    return checkpoint.CheckpointPolicy.MUST_SAVE if kept else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


def sequence_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each sequence in nats, (B,), from logits (B, T, V); targets of -100 count as loss 0.

    Some sequences at a time, and again in the backward pass: of all logits at once, float32 and its softmax would take
    several times the memory of the logits, which for a large vocabulary is more than that of all blocks.
    """
    if not len(logits):  # a rank's part may be empty; torch would never end to flatten a DTensor without rows
        return logits.sum((1, 2))
    size = max(1, FLOAT_LOGITS // max(1, logits.shape[1:].numel()))
    if len(logits) <= size:
        return _sequence_losses(logits, targets)
    parts = zip(logits.split(size), targets.split(size), strict=True)
    # Nothing here draws random numbers.
    again = functools.partial(checkpoint.checkpoint, _sequence_losses, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([again(*part) for part in parts])


def _sequence_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    float_logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(float_logits, targets.flatten(), reduction="none").view(targets.shape).mean(1)


def loss(logits: torch.Tensor, targets: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
    """Sum of the losses of a batch's sequences, (); those of each, (B,), are appended to `losses`."""
    found = sequence_losses(logits, targets)
    losses.append(found.detach())  # its graph would hold a micro-batch's activations until the next step
    return found.sum()
