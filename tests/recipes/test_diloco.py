"""diloco_gpt with replicas that train apart: a plain loop of all of them, its bytes, and exact resume in mid-round.

As one replica it is ddp_gpt, so the tests of all recipes run it like that (`runner.layouts`).
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import keymap
from common.train import initial, sampler
from common.workloads import gpt, text
from torch.nn import functional as F

from tests.harness import mutants, probes, runner, states
from tests.recipes.test_equivalence import BATCH, CLIP, DECAY, RATES, WARMUP, Curve, clip_and_step, worst

RECIPE = "diloco_gpt"
STEPS = 12
EVAL_EVERY = 4  # in mid-round, and at its end
OUTER = ("--outer-lr", "0.7", "--outer-momentum", "0.9")
FLAGS = [
    *runner.small(RECIPE),
    *("--epochs", "1", "--max-steps", "0", "--stop-after", str(STEPS), "--global-batch-size", str(BATCH)),
    *("--max-grad-norm", str(CLIP), "--lr", str(RATES["gpt"]), "--lr-reference-batch", str(BATCH)),
    *("--weight-decay", str(DECAY), "--warmup-steps", str(WARMUP), "--log-every", "1", "--save-every", "1000"),
    *("--eval-every", str(EVAL_EVERY), "--check-every", "1", "--dtype", "float64"),
]


def as_sent(difference: torch.Tensor, error: torch.Tensor, compress: str) -> torch.Tensor:
    """What arrives of a replica's difference; `error` is changed to what of it is still to be sent."""
    if compress == "bf16":
        return difference.bfloat16()
    if compress == "int8":
        wanted = difference + error
        scale = wanted.abs().max() / 127
        arrives = torch.round(wanted / scale) * scale
        error.copy_(wanted - arrives)
        return arrives
    return difference


@dataclass(frozen=True)
class How:
    """What a plain loop does; `fragments` gives the parameters of each by the beginnings of their names.

    Attributes:
        turns: the step of each round, from 1, after which each fragment is sent.
    """

    replicas: int = 2
    inner_steps: int = 3
    rate: float = 0.7
    momentum: float = 0.9
    compress: str = "none"
    fragments: tuple[tuple[str, ...], ...] = (("",),)
    turns: tuple[int, ...] = ()
    delay: int = 0
    mixing: float = 0.0

    @property
    def flags(self) -> tuple[str, ...]:
        """The same for the recipe."""
        values: dict[str, Any] = {"replicas": self.replicas, "inner-steps": self.inner_steps, "outer-lr": self.rate}
        values |= {"outer-momentum": self.momentum, "fragments": len(self.fragments), "delay": self.delay}
        values |= {"mixing": self.mixing, "compress": self.compress}
        return tuple(word for name, value in values.items() for word in (f"--{name}", str(value)))


def make_replica() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The small model of `FLAGS`, and its own optimizer."""
    with torch.device("meta"):
        model = gpt.GPT(gpt.Shape(256, num_layers=3, num_heads=4, width=40, mlp_width=44))
    initial.materialize(model, 0, torch.device("cpu"), torch.float64)
    matrices = {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": DECAY}
    others = {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}
    return model, torch.optim.AdamW([matrices, others], betas=(0.9, 0.95))


def plain_loop(folder: Path, how: How) -> Curve:
    """All replicas in one process, as one would write it: local steps, and Nesterov's on the mean difference."""
    train, validation = text.load(str(folder), 16)
    models, optimizers = zip(*(make_replica() for _ in range(how.replicas)), strict=True)
    weights = [dict(model.named_parameters()) for model in models]
    shared = {name: p.detach().clone() for name, p in weights[0].items()}
    errors = [{name: torch.zeros_like(p) for name, p in shared.items()} for _ in weights]
    outer = torch.optim.SGD(shared.values(), lr=how.rate, momentum=how.momentum, nesterov=how.momentum > 0)
    order = sampler.permutation(len(train), 0, 0)
    every = np.arange(len(validation))
    turns = how.turns or (how.inner_steps,)
    sent: dict[str, tuple[int, torch.Tensor]] = {}
    losses, norms, held_out = [], [], {}
    for step in range(1, STEPS + 1):
        of_replicas = np.split(order[(step - 1) * BATCH : step * BATCH], how.replicas)
        mean_loss = 0.0
        for model, optimizer, batch in zip(models, optimizers, of_replicas, strict=True):
            tokens, targets = train.read(np.zeros_like(batch), batch)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            norm = clip_and_step(model, optimizer, step - 1, math.ceil(len(train) / BATCH), RATES["gpt"])
            mean_loss += loss.item() / how.replicas
            if model is models[0]:  # the log is that of rank 0
                norms.append(norm)
        losses.append(mean_loss)
        for name, before in shared.items():
            (turn,) = [turn for starts, turn in zip(how.fragments, turns, strict=True) if name.startswith(starts)]
            if (step - turn) % how.inner_steps == 0:
                pairs = zip(weights, errors, strict=True)
                arrive = [as_sent(before - own[name].detach(), error[name], how.compress) for own, error in pairs]
                # Added up as they are sent.
                sent[name] = (step + how.delay, sum(arrive[1:], arrive[0]).double() / how.replicas)
            arrives, mean = sent.get(name, (0, before))
            before.grad = mean if arrives == step else None
        outer.step()
        for name, own in ((name, p) for named in weights for name, p in named.items() if shared[name].grad is not None):
            own.data = how.mixing * own.detach() + (1 - how.mixing) * shared[name]
        if step % EVAL_EVERY == 0 or step == STEPS:
            tokens, targets = validation.read(np.zeros_like(every), every)
            means = {name: torch.stack([own[name] for own in weights]).mean(0).detach() for name in shared}
            logits = torch.func.functional_call(models[0], means, tokens).detach()
            held_out[step] = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    return Curve(losses, norms, held_out)


def difference(folder: Path, out: Path, size: int, wanted: Curve, *flags: str, recipe: str | Path = RECIPE) -> float:
    """Largest relative difference of a run's losses, gradient norms and validation losses from the plain ones."""
    where = ("--data", str(folder), "--out", str(out), "--name", "run")
    result = runner.run_recipe(recipe, size, *FLAGS, *where, *flags)
    assert result.ok, str(result)
    found = [runner.records(out / "run", tag) for tag in ("train/loss", "train/grad_norm", "val/loss")]
    assert found[2].keys() == wanted.held_out.keys()
    of_validation = max(abs(found[2][step] / value - 1) for step, value in wanted.held_out.items())
    return max(worst(found[0], wanted.losses, STEPS), worst(found[1], wanted.norms, STEPS), of_validation)


PARTS = (("embed", "blocks.0"), ("blocks.1",), ("blocks.2", "norm", "head"))
# Ranks, and how.
WAYS: dict[str, tuple[int, How]] = {
    "average after each step": (2, How(inner_steps=1, rate=1.0, momentum=0.0)),
    "outer momentum after each step": (2, How(inner_steps=1)),
    "local SGD": (2, How(rate=1.0, momentum=0.0)),
    "three replicas": (3, How(replicas=3)),
    "two replicas of two ranks": (4, How()),
    "bf16": (2, How(compress="bf16")),
    "int8": (2, How(compress="int8")),
    "fragments": (2, How(inner_steps=4, fragments=PARTS, turns=(1, 2, 4))),
    "fragments in 8 bits that arrive later": (
        *(2, How(inner_steps=4, compress="int8", fragments=PARTS, turns=(1, 2, 4), delay=3, mixing=0.25)),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_plain_loop(way: str, small_text: Path, tmp_path: Path) -> None:
    size, how = WAYS[way]
    assert difference(small_text, tmp_path, size, plain_loop(small_text, how), *how.flags) < 1e-9


# What is wrong, in which way.
MUTANTS: dict[str, tuple[str, mutants.Changes]] = {
    "the outer momentum is forgotten": (
        *(
            "outer momentum after each step",
            {"Outer": {"self.momentum[name].mul_(self.args.outer_momentum)": "torch.zeros_like(mean)"}},
        ),
    ),
    "heavy ball in place of Nesterov": (
        *("three replicas", {"Outer": {"mean + self.args.outer_momentum * momentum": "momentum"}}),
    ),
    "a sum in place of the mean": (
        *("local SGD", {"Outer": {"sent.to(flat.dtype) / group.size()": "sent.to(flat.dtype)"}}),
    ),
    "the outer step is one step late": ("local SGD", {"Outer": {"if since == 0: ...": "if since == 1: ..."}}),
    "each rank is evaluated as it is": (
        *("local SGD", {"forward_only": {"model.strategy.averaged()": "contextlib.nullcontext()"}}),
    ),
    "replicas send their gradients": ("local SGD", {"parallelize": {'mesh.get_group("dp")': "None"}}),
    "what rounding takes away is lost": (
        *("int8", {"Outer": {"self.errors[name].copy_(one - code * scale)": "pass"}}),
    ),
    "codes get this replica's scales": (*("int8", {"Outer": {"every_scale.view(group.size(), -1)": "scales[None]"}}),),
    "all fragments take the last turn": ("fragments", {"Outer": {"i + 1": "len(self.fragments)"}}),
    "what arrives later replaces all": (
        *("fragments in 8 bits that arrive later", {"Outer": {"1 - self.args.mixing if self.args.delay else 1": "1"}}),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(mutant: str, small_text: Path, tmp_path: Path) -> None:
    way, changes = MUTANTS[mutant]
    size, how = WAYS[way]
    path = mutants.mutate(RECIPE, tmp_path, changes)
    flags = (*how.flags, "--check-every", "0")
    assert difference(small_text, tmp_path, size, plain_loop(small_text, how), *flags, recipe=path) > 1e-6


def calls(folder: Path, size: int, *flags: str) -> list[tuple[str, int]]:
    """Kind and elements of the large calls of the third step."""
    flags = ("--num-layers", "2", "--width", "64", "--seq-len", "8", "--global-batch-size", "4", *flags)
    found = probes.in_ranks(probes.probe, RECIPE, size, list(flags), folder)
    return sorted((kind, elements) for kind, elements in found[0]["calls"] if elements >= 100)


def test_sends_all_differences_once_a_round(tmp_path: Path) -> None:
    """4 P / H bytes a step. A replica of one rank reduces its gradients with nobody, in DDP's buckets.

    The third step begins with the outer step that ends the second.
    """
    with torch.device("meta"):
        size = sum(p.numel() for p in gpt.GPT(gpt.Shape(256, num_layers=2, num_heads=4, width=64)).parameters())
    alone = calls(tmp_path / "between", 2, "--inner-steps", "4")
    assert {kind for kind, _ in alone} == {"all-reduce"}
    assert sum(elements for _, elements in alone) == size
    outer = [("all-reduce", size)]
    assert calls(tmp_path / "outer", 2, "--inner-steps", "2") == sorted(alone + outer)
    codes = [("all-gather", 2 * size)]
    assert calls(tmp_path / "int8", 2, "--inner-steps", "2", "--compress", "int8") == sorted(alone + codes)


def run(
    out: Path, size: int, data: Path, *flags: str, recipe: str | Path = RECIPE, fails: bool = False
) -> dict[str, dict[int, float]]:
    """Run until it stops, in float32, or possibly `fails`; returns the curves so far."""
    how = (*runner.small(RECIPE), "--data", str(data), "--dtype", "float32", "--global-batch-size", "24")
    how += ("--max-steps", "14", "--warmup-steps", "2", "--log-every", "1", "--save-every", "1000")
    where = ("--out", str(out.parent), "--name", out.name)
    result = runner.run_recipe(recipe, size, *how, *where, *flags)
    assert result.ok or fails, str(result)
    curves = {tag: runner.records(out, tag) for tag in ("train/loss", "train/grad_norm", "val/loss")}
    return curves | {"output": result.outputs[0]}  # type: ignore[dict-item]


ROUND = ("--inner-steps", "4", "--compress", "int8", "--fragments", "3", "--delay", "2", *OUTER)


@pytest.mark.parametrize(("size", "replicas"), [(2, 2), (4, 2)])
def test_resume_in_mid_round_bitwise(size: int, replicas: int, small_text: Path, tmp_path: Path) -> None:
    """Weights and moments of each replica, what rounding took away, the outer momentum, the place in the round."""
    how = (*ROUND, "--replicas", str(replicas))
    whole = run(tmp_path / "whole", size, small_text, *how)
    for stop in ("3", "4", "6", "0"):
        parts = run(tmp_path / "parts", size, small_text, *how, "--stop-after", stop)
    for tag in ("train/loss", "train/grad_norm"):
        assert parts[tag] == whole[tag]
    last = "checkpoints/step_00000014"
    assert states.same_tensors(tmp_path / "parts" / last, tmp_path / "whole" / last)


FORGETS: dict[str, mutants.Changes] = {
    "the place in the round": {"Outer": {'int(tensors[f"{keymap.STRATEGY}steps"])': "4"}},
    "what rounding took away": {"Outer": {'{f"{name}.error": error for name, error in self.errors.items()}': "{}"}},
    "the outer momentum": {
        "Outer": {'more |= {f"momentum.{name}": one for name, one in self.momentum.items()}': "pass"}
    },
    "the weights before the round": {
        "Outer": {'more |= {f"before.{name}": one for name, one in self.before.items()}': "pass"}
    },
}


@pytest.mark.parametrize("mutant", FORGETS)
def test_resume_notices(mutant: str, small_text: Path, tmp_path: Path) -> None:
    path = mutants.mutate(RECIPE, tmp_path, FORGETS[mutant])
    whole = run(tmp_path / "whole", 2, small_text, *ROUND)
    run(tmp_path / "parts", 2, small_text, *ROUND, "--stop-after", "6", recipe=path)
    # What no checkpoint fills is whatever the memory holds, which may be no number.
    parts = run(tmp_path / "parts", 2, small_text, *ROUND, recipe=path, fails=True)
    losses = parts["train/loss"]
    assert any(losses[step] != whole["train/loss"][step] for step in losses if step > 6), losses


def test_any_recipe_gets_the_mean_and_the_first_optimizer(small_text: Path, tmp_path: Path) -> None:
    """Also as one more replica. What it has had apart is gone then, and a line says so."""
    run(tmp_path / "two", 2, small_text, "--inner-steps", "4", "--stop-after", "6")
    saved = states.tensors(tmp_path / "two/checkpoints/step_00000006")
    of: dict[str, list[torch.Tensor]] = {}
    for (_, name), tensor in sorted(saved.items()):
        of.setdefault(name, []).append(tensor)
    own = {name.removeprefix("strategy.replicas."): two for name, two in of.items() if ".replicas." in name}
    apart = 0
    for name, (first, second) in own.items():
        (plain,) = of[name]
        apart += not torch.equal(first, second)
        wanted = first if name.startswith(keymap.OPTIMIZER) else (first + second) / 2
        assert torch.equal(plain, wanted.view_as(plain)), name
    assert apart > len(own) / 2
    resume = ("--resume", str(tmp_path / "two"))
    ddp = run(tmp_path / "ddp", 2, small_text, *resume, "--stop-after", "8", recipe="ddp_gpt")
    three = run(tmp_path / "three", 3, small_text, *resume, "--inner-steps", "4", "--stop-after", "8")
    back = run(tmp_path / "back", 2, small_text, "--resume", str(tmp_path / "ddp"))
    assert three["train/loss"][7] == pytest.approx(ddp["train/loss"][7], rel=1e-6)
    note: Any = "so it is of another strategy or number of ranks"
    assert [note in str(one["output"]) for one in (ddp, three, back)] == [False, True, True]
    assert [*back["train/loss"]] == [*range(9, 15)]
