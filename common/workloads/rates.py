"""Rates of a model's parts: frozen backbones, and parts that learn at another rate than the rest."""

import math
from typing import Any

from torch import nn
from torch.optim import LBFGS, Muon, Optimizer

from common import UserError, keymap, ranks

ALL = "all"
EVAL = "eval"  # in the place of a factor: 0, and in eval mode, so that BatchNorm keeps its statistics


def parse(rates: str) -> dict[str, float]:
    """Factors by part: {"all": 0.1, "fc": 1.0} of "all=0.1,fc=1".

    Raises:
        UserError: it is not a list of parts and factors.
    """
    found: dict[str, float] = {}
    for one in rates.split(",") if rates else []:
        part, _, number = one.partition("=")
        try:
            found[part] = 0.0 if number == EVAL else float(number)
        except ValueError:
            found[part] = math.nan
        if not (part and 0 <= found[part] < math.inf):
            raise UserError(f"--rates {rates!r}: {one!r} must be PART=FACTOR, such as fc=10, or embed=0 to freeze it")
    return found


def factor(name: str, factors: dict[str, float]) -> float:
    """Factor of a parameter's rate: that of the longest part that its name begins with."""
    parts = [part for part in factors if f"{name}.".startswith(f"{part}.")]
    return factors[max(parts, key=len)] if parts else factors.get(ALL, 1.0)


def freeze(model: nn.Module, rates: str) -> nn.Module:
    """Freeze the parameters whose factor is 0, before a strategy looks at them; returns the model.

    Parts with "eval" for a factor are put into eval mode as well, and stay there: without dropout, and with the
    statistics that their BatchNorms have.

    Args:
        model: the plain model, with or without weights.
        rates: the flag, such as "all=0,fc=1".

    Raises:
        UserError: the model has no such part, or nothing is left to train.
    """
    factors = parse(rates)
    named = dict(model.named_parameters())
    outermost = dict.fromkeys(name.partition(".")[0] for name in named)
    for part in factors:
        if part != ALL and not any(f"{name}.".startswith(f"{part}.") for name in named):
            raise UserError(f"--rates {rates!r}: the model has no part {part!r}; its parts are {', '.join(outermost)}")
    frozen = [name for name in named if factor(name, factors) == 0]
    if len(frozen) == len(named):
        raise UserError(f"--rates {rates!r} freezes the whole model: one factor must be above 0")
    for name in frozen:
        named[name].requires_grad_(False)
    rest = {ALL: 0.0} | {part: float(f"{part}={EVAL}" in rates.split(",")) for part in factors}
    for name, module in model.named_modules():
        if name and factor(name, rest):
            module.training = False  # without its parts, which may have factors of their own
    if factors:
        averages = [name for name, _ in model.named_buffers() if name.endswith("running_mean")]
        still = any(factor(name, factors) == 0 and not factor(name, rest) for name in averages)
        ranks.print0(
            f"rates    {rates}: {len(frozen)} of {len(named)} tensors are frozen"
            f"{'; averages of their BatchNorms still follow the data (=eval for =0 keeps them)' if still else ''}"
        )
    return model


def groups(model: nn.Module, rates: str, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """An optimizer's groups: one for each factor, and in it one with weight decay, for matrices, and one without.

    Args:
        model: the model under its strategy.
        rates: the flag; see `freeze`.
        lr: the rate of the parts whose factor is 1.
        weight_decay: of parameters of two dims and more.
    """
    factors = parse(rates)
    named = {keymap.canonical(name): parameter for name, parameter in model.named_parameters()}
    found = []
    # The same groups on every rank, whatever parts it has; the highest rate first, which the log shows.
    for one in sorted({factors.get(ALL, 1.0), *factors.values()} - {0.0}, reverse=True):
        mine = [parameter for name, parameter in named.items() if factor(name, factors) == one]
        for decay, matrices in ((weight_decay, True), (0.0, False)):
            params = [parameter for parameter in mine if (parameter.ndim > 1) == matrices]
            found.append({"params": params, "lr": one * lr, "weight_decay": decay})
    return found


def name_unheld(model: nn.Module, optimizer: Optimizer) -> None:
    """Warn of parameters that no rank's optimizer holds, and of those that the model lacks (all ranks).

    The former stay as they are; the latter, such as a temperature of the loss, are in no checkpoint.

    Args:
        model: the model under its strategy.
        optimizer: of its parameters.

    Raises:
        UserError: the optimizer's first step would make a state that no checkpoint can hold.
    """
    if any(isinstance(one, LBFGS) for one in keymap.parts_of(optimizer)):
        raise UserError(
            "LBFGS keeps lists of the directions of its last steps, which no checkpoint holds: "
            "use an optimizer whose state is tensors and numbers"
        )
    if any(isinstance(one, Muon) for one in keymap.parts_of(optimizer)):
        ranks.print0(
            "note: torch.optim.Muon computes in bfloat16, and all of it on every rank: on another number of ranks, the "
            "last digits are others. common/workloads/muon.py, as of --optimizer muon, is exact, and shares the work"
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = {keymap.canonical(name): one for name, one in model.named_parameters() if one.requires_grad}
    mine = {name: (one.numel(), id(one) in held) for name, one in named.items()}
    everyone = ranks.gather(mine)
    sizes = {name: size for part in everyone for name, (size, _) in part.items()}
    # On another rank, it may be in a part of the model, or of the optimizer, that this one lacks.
    unheld = sizes.keys() - {name for part in everyone for name, (_, is_held) in part.items() if is_held}
    if unheld:
        count = sum(sizes[name] for name in unheld)
        total = sum(sizes.values())
        ranks.print0(
            f"warning: no group of the optimizer holds {ranks.listed(sorted(unheld))}: {count:,} of {total:,} numbers "
            f"({count / total:.1%}) are not trained; add them in make_optimizer, or freeze them with "
            "requires_grad_(False)"
        )
    foreign = held - {id(parameter) for parameter in model.parameters()}
    if foreign:
        ranks.print0(
            f"warning: the optimizer holds {len(foreign)} tensors that are no parameters of the model: no checkpoint "
            "holds them; make them parameters of a module in make_model, and the optimizer after parallelize"
        )


def show(optimizer: Optimizer, warmup_steps: int, max_steps: int) -> None:
    """Print the peak rates of an optimizer's groups, and what the warm-up is of the whole training.

    Args:
        optimizer: before its first step.
        warmup_steps: 0 for a recipe without a warm-up.
        max_steps: of the training.
    """
    peaks = [group["lr"] for group in optimizer.param_groups]
    shown = " to ".join(f"{peak:.4g}" for peak in sorted({min(peaks), max(peaks)}))
    warmup = f"; --warmup-steps {warmup_steps:,} of {max_steps:,} steps" if warmup_steps else ""
    if warmup_steps >= max_steps:
        warmup = f"; --warmup-steps {warmup_steps:,} is not below the training's {max_steps:,} steps"
    ranks.print0(f"peak learning rate {shown}{warmup}")
