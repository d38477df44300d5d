"""Experts in the place of a GPT's MLPs: a router sends each token to some of them (mixture of experts).

Each expert's matrices are tensors of their own, `blocks.0.mlp.experts.3.up.weight`. So a strategy can leave experts out
on a rank, and put its own function in the place of `Moe.mix`, and each tensor keeps its name.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from common import UserError, bounds, ranks
from common.workloads import gpt, moe_names, products


@dataclasses.dataclass(frozen=True)
class RouterArgs:
    """Flags of the experts and of their router."""

    # experts
    experts: bounds.PositiveInt = 8  # experts of each layer, MLPs of mlp_width; 1 for a model without any
    top_k: bounds.PositiveInt = 2  # experts that each token goes to
    shared_experts: bounds.NonNegativeInt = 0  # further experts, which all tokens go to
    router: Literal["softmax", "sigmoid"] = "softmax"  # how choices are weighted: Mixtral's way, or DeepSeek-V3's
    bias_rate: bounds.NonNegativeFloat = 1e-3  # sigmoid: step of each expert's bias, which balances without a loss
    balance_loss: bounds.NonNegativeFloat = 0.01  # factor on the balance loss, which is 1 if all experts are used alike
    balance: Literal["step", "micro"] = "step"  # tokens whose balance counts: of a step, or of each micro-batch
    z_loss: bounds.NonNegativeFloat = 0.0  # factor on the mean square of the router's log-sum-exp, such as 1e-3
    capacity_factor: bounds.NonNegativeFloat = 0.0  # of each sequence, an expert takes this times its share; 0 for all


@dataclasses.dataclass(frozen=True)
class Routing:
    """How tokens choose experts; the fields are those of `RouterArgs`."""

    experts: int
    top_k: int
    shared_experts: int = 0
    router: str = "softmax"
    capacity_factor: float = 0.0

    @staticmethod
    def of(args: Any) -> "Routing":
        """What a recipe's flags ask for.

        Raises:
            UserError: a token would have to go to more experts than there are; or a model without any has shared ones.
        """
        if args.experts == 1 and args.shared_experts:
            raise UserError(
                f"--shared-experts {args.shared_experts} needs --experts 2 or more: 1 is a model without any"
            )
        if 1 < args.experts < args.top_k:
            raise UserError(f"--top-k {args.top_k} must be at most --experts {args.experts}")
        return Routing(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Routing)})


class Routed(NamedTuple):
    """What the router has done with the tokens of a forward pass: of one layer, or of L, stacked."""

    counts: torch.Tensor  # (E,) tokens that chose each expert, whether it takes them or not
    probabilities: torch.Tensor  # (E,) sum of each expert's probability over the tokens, with its gradient
    z: torch.Tensor  # () sum of the squares of the tokens' log-sum-exps, with its gradient
    dropped: torch.Tensor  # () choices that no expert takes


class Experts(nn.Module):
    """Experts, each of which computes its rows; a strategy may leave some out, by their numbers.

    It is no ModuleDict: torch 2.11 does not let FSDP take one.
    """

    def __init__(self, experts: Iterable[nn.Module]) -> None:
        super().__init__()
        for i, expert in enumerate(experts):
            self.add_module(str(i), expert)

    def __len__(self) -> int:
        return len(self._modules)

    def are_grouped(self, x: torch.Tensor) -> bool:
        """Whether one grouped product computes them all, and not one expert after the other.

        It does where `products.is_fast`, if there are several, of MLPs whose rows are multiples of 16 bytes, as torch's
        kernel wants.
        """
        fit = (
            type(expert) is gpt.Mlp and expert.gate.in_features % 8 == expert.gate.out_features % 8 == 0
            for expert in self.children()
        )
        return len(self) > 1 and products.is_fast(x) and all(fit)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
        """Map (n, C) to (n, C); the first counts[0] rows belong to the first expert, and so on.

        An expert without rows takes part, so that its gradient is 0, not missing.

        Args:
            rows: of all experts.
            counts: how many each has, (E,).
            sizes: the same on the host; None if nothing has waited for them, as `are_grouped`.
        """
        if sizes is None or (len(rows) and self.are_grouped(rows)):
            return grouped(list(self.children()), rows, counts)
        parts = zip(self.children(), rows.split(sizes), strict=True)
        return torch.cat([expert(part) for expert, part in parts])


def grouped(experts: list[Any], rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """As `gpt.Mlp` of each expert's rows, in three products, whatever their number."""
    ends = counts.cumsum(0, dtype=torch.int32)

    def product(part: str, x: torch.Tensor) -> torch.Tensor:
        matrices: Any = (getattr(expert, part).weight.to(x.dtype) for expert in experts)
        return products.Product.apply(x, ends, *matrices)

    return product("down", F.silu(product("gate", rows)) * product("up", rows))


Mix = Callable[[Experts, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Moe(nn.Module):
    """A router and its experts; `routed` is what it has done in the latest forward pass."""

    def __init__(self, shape: gpt.Shape, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.mix: Mix = functools.partial(mix, drops=routing.capacity_factor > 0)
        self.routed: Routed | None = None
        self.router = nn.Linear(shape.width, routing.experts, bias=False)
        self.experts = Experts(gpt.Mlp(shape) for _ in range(routing.experts))
        wide = dataclasses.replace(shape, mlp_width=max(1, routing.shared_experts) * shape.mlp_width)
        self.shared = gpt.Mlp(wide) if routing.shared_experts else None
        self.balance_bias: torch.Tensor
        if routing.router == "sigmoid":  # not on meta, where nothing would fill it
            self.register_buffer("balance_bias", torch.zeros(routing.experts, device="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, T, C) to (B, T, C)."""
        logits = self.router(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # (B, T, E)
        chosen, weights, probabilities = self.choose(logits)
        taken = within_capacity(chosen, self.routing)
        self.routed = Routed(
            count(chosen, self.routing.experts),
            probabilities.sum((0, 1)),
            logits.logsumexp(2).square().sum(),
            (taken == self.routing.experts).sum(),
        )
        flat = [part.flatten(0, 1) for part in (x, taken, weights.to(x.dtype))]
        mixed = self.mix(self.experts, *flat).view_as(x)
        return mixed if self.shared is None else mixed + self.shared(x)

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Each token's experts and their weights, both (B, T, k), and the probabilities to balance, (B, T, E).

        "softmax" is that of the chosen logits (Jiang et al. 2024, section 2.1, https://arxiv.org/abs/2401.04088).
        "sigmoid" chooses by score and bias, and weights by score (DeepSeek-AI 2024, section 2.1.2,
        https://arxiv.org/abs/2412.19437).
        """
        if self.routing.router == "softmax":
            best, chosen = logits.topk(self.routing.top_k, 2)
            return chosen, best.softmax(2), logits.softmax(2)
        scores = logits.sigmoid()
        chosen = (scores.detach() + self.balance_bias).topk(self.routing.top_k, 2).indices
        best = scores.gather(2, chosen)
        return chosen, best / best.sum(2, keepdim=True), scores / scores.sum(2, keepdim=True)


def with_experts(model: gpt.GPT, routing: Routing) -> gpt.GPT:
    """Put experts in the place of each block's MLP; with one expert, the model stays as it is."""
    whole: Any = model
    whole.names_in = functools.partial(moe_names.names_in, model.names_in, model.shape, routing)
    for block in model.blocks.values() if routing.experts > 1 else ():
        block.mlp = Moe(model.shape, routing)
    return model


def layers(model: Any) -> dict[str, Moe]:
    """The layers with experts, by the names of their blocks; empty for a model without experts."""
    return {name: block.mlp for name, block in model.blocks.items() if isinstance(block.mlp, Moe)}


def parameters(model: Any) -> tuple[int, int]:
    """How many a model has, and how many of them a token meets: those of `top_k` of the experts of each layer."""
    total = sum(one.numel() for one in model.parameters())
    idle = [
        sum(one.numel() for one in layer.experts.parameters()) * (1 - layer.routing.top_k / layer.routing.experts)
        for layer in model.modules()
        if isinstance(layer, Moe)
    ]
    return total, round(total - sum(idle))


def within_capacity(chosen: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The choices, (B, T, k), with the number of experts, which is none, for those that an expert does not take.

    Of each sequence, it takes the first tokens that choose it, up to its share of all choices times the factor. So what
    is dropped depends neither on other sequences nor on later tokens, and not on who computes what.
    """
    if not routing.capacity_factor:
        return chosen
    length = chosen.shape[1]
    capacity = math.ceil(routing.capacity_factor * length * routing.top_k / routing.experts)
    is_chosen = (chosen[..., None] == torch.arange(routing.experts, device=chosen.device)).any(2)  # (B, T, E)
    place = is_chosen.cumsum(1).gather(2, chosen)  # of each token among those of its sequence and expert, from 1
    return chosen.where(place <= capacity, routing.experts)


# --- From tokens to rows of experts, and back -------------------------------------------------------------


def count(chosen: torch.Tensor, num_experts: int) -> torch.Tensor:
    """How often each expert is among the choices, (E,)."""
    flat = chosen.flatten()
    return torch.zeros(num_experts + 1, dtype=flat.dtype, device=flat.device).scatter_add_(
        0, flat, torch.ones_like(flat)
    )[:num_experts]


def to_host(counts: torch.Tensor, rows: int) -> Any:
    """Numbers of rows as lists: a layer's only wait for the device. Without data, as on meta, equal shares of all rows.

    Args:
        counts: of the rows of each expert, (E,) or (n, ranks, E / ranks).
        rows: choices, of which each is a row if none is dropped.
    """
    return equal_shares(counts, rows) if counts.is_meta else counts.tolist()


def equal_shares(counts: torch.Tensor, rows: int) -> Any:
    """What `to_host` returns if each expert has as many rows as the others, or one more."""
    size = counts.numel() // (len(counts) if counts.ndim > 1 else 1)
    shares = np.diff(np.arange(size + 1) * rows // size)
    return np.resize(shares, counts.shape).tolist()


def rows_of(x: torch.Tensor, chosen: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A row for each choice, in the order of the experts, (num, C); and which choice it is, (num,).

    Args:
        x: tokens, (N, C).
        chosen: (N, k).
        num: choices that an expert takes.
    """
    order = chosen.flatten().argsort(stable=True)[:num]
    # Copies, then a permutation: its gradient adds nothing up, which several threads would do in any order.
    return x.repeat_interleave(chosen.shape[1], 0)[order], order


def combine(rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum of each token's results, (N, C), from what `rows_of` returns the order of; weights: (N, k)."""
    every = rows.new_zeros(weights.numel(), rows.shape[1]).index_copy(0, order, rows)
    return (every.view(*weights.shape, rows.shape[1]) * weights[..., None]).sum(1)


def mix(
    experts: Experts, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, parts: int = 1, drops: bool = True
) -> torch.Tensor:
    """What the chosen experts that are here make of each token, (N, C).

    Args:
        experts: E of them.
        x: tokens, (N, C).
        chosen: the experts of each, (N, k); E for none.
        weights: of their results, (N, k).
        parts: of all experts, of which these are one.
        drops: whether some choices may be E. If not, the host needs to know no sizes where experts are grouped.
    """
    counts = count(chosen, len(experts))
    sizes = to_host(counts, chosen.numel() // parts) if drops or not experts.are_grouped(x) else None
    rows, order = rows_of(x, chosen, chosen.numel() if sizes is None else sum(sizes))
    return combine(experts(rows, counts, sizes), order, weights)


# --- What a step does with what routers have done ----------------------------------------------------------


def routed(model: Any) -> Routed | None:
    """What the routers of all layers have done in the latest forward pass, stacked; None without experts."""
    found = [layer.routed for layer in layers(model).values()]
    return Routed(*map(torch.stack, zip(*found, strict=True))) if found else None


def forget(model: Any) -> None:
    """Let the layers forget it: it holds the graph of the pass, or of a block that a backward pass has recomputed."""
    for layer in layers(model).values():
        layer.routed = None


def losses(here: Routed, counts: torch.Tensor, tokens: float) -> dict[str, torch.Tensor]:
    """A micro-batch's or a rank's part of a step's router losses; the parts add up to the losses of the step.

    The balance loss of a layer is the sum over its experts of E f P: f is an expert's share of the choices, P its mean
    probability (Fedus et al. 2021, section 2.2, https://arxiv.org/abs/2101.03961). It is 1 if all are used alike;
    transformers' is k times it. Over layers it is the mean. The choices have no gradient, so a part needs those of all
    tokens, but the probabilities of its own alone. The z-loss is that of Zoph et al. 2022,
    https://arxiv.org/abs/2202.08906.

    Args:
        here: what the routers have done with the part's tokens, of L layers.
        counts: choices of all tokens whose balance counts, the part's among them, (L, E).
        tokens: of the whole step.
    """
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    balance = counts.shape[1] * (shares.to(here.probabilities.dtype) * here.probabilities).sum(1)
    return {"balance_loss": balance.mean() / tokens, "z_loss": here.z.mean() / tokens}


@torch.no_grad()
def shift_biases(model: Any, counts: torch.Tensor, rate: float) -> None:
    """After a step: raise the bias of experts with fewer choices than the mean, lower that of those with more.

    Wang et al. 2024, https://arxiv.org/abs/2408.15664.

    Args:
        model: its layers may have biases, or none.
        counts: choices of the whole step, (L, E).
        rate: by how much.
    """
    missing = (counts.sum(1, keepdim=True) - counts * counts.shape[1]).sign()
    for layer, row in zip(layers(model).values(), missing, strict=True):
        if layer.routing.router == "sigmoid":
            layer.balance_bias.add_(row, alpha=rate)


def loads(model: Any, here: Routed, length: int) -> dict[str, torch.Tensor]:
    """Sums over sequences of each expert's load, of which 1 is an equal share; and of the share of dropped choices.

    Args:
        model: of L layers with experts.
        here: what the routers have done with the sequences.
        length: tokens of a sequence.
    """
    found: dict[str, torch.Tensor] = {}
    for (name, layer), row in zip(layers(model).items(), here.counts, strict=True):
        share = length * layer.routing.top_k / layer.routing.experts
        found |= {f"load/{name}/{i}": one for i, one in enumerate((row.double() / share).unbind())}
        if layer.routing.capacity_factor:
            found["dropped"] = here.dropped.double().mean() / (length * layer.routing.top_k)
    return found


class Idle:
    """Names the experts that no token has chosen for some steps; they learn nothing."""

    def __init__(self, steps: int) -> None:
        """Look each time after so many steps."""
        self._every = steps
        self._steps = 0
        self._counts: Any = 0
        self._named: list[str] = []

    def add(self, model: Any, counts: torch.Tensor) -> None:
        """After a step; counts: choices of the whole step, (L, E)."""
        self._counts = self._counts + counts
        self._steps += 1
        if self._steps % self._every:
            return
        places = zip(layers(model), self._counts.tolist(), strict=True)
        idle = [f"{i} of blocks.{name}" for name, row in places for i, number in enumerate(row) if number == 0]
        if idle and idle != self._named:
            ranks.print0(f"warning: no token has chosen expert {ranks.listed(idle)} in the last {self._every} steps")
        self._named = idle
        self._counts = 0
