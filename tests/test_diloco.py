"""diloco_gpt with replicas that train apart: a plain loop of all of them, its bytes, and exact resume in mid-round.

As one replica it is ddp_gpt, so the tests of all recipes run it like that (`runner.layouts`).
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import initial, keymap, sampler
from common.workloads import gpt, text
from torch.nn import functional as F

from tests.harness import mutants, probes, runner, states
from tests.test_equivalence import BATCH, CLIP, DECAY, RATES, Curve, clip_and_step, worst

RECIPE = "diloco_gpt"
STEPS = 12
EVAL_EVERY = 4  # in mid-round, and at its end
OUTER = ("--outer-lr", "0.7", "--outer-momentum", "0.9")
FLAGS = [
    *runner.small(RECIPE),
    *("--epochs", "1", "--max-steps", "0", "--stop-after", str(STEPS), "--global-batch-size", str(BATCH)),
    *("--max-grad-norm", str(CLIP), "--lr", str(RATES["gpt"]), "--lr-reference-batch", str(BATCH)),
    *("--weight-decay", str(DECAY), "--warmup-steps", "5", "--log-every", "1", "--save-every", "1000"),
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


def plain_loop(
    folder: Path, replicas: int, inner_steps: int, rate: float = 0.7, momentum: float = 0.9, compress: str = "none"
) -> Curve:
    """All replicas in one process, as one would write it: local steps, and Nesterov's on the mean difference."""
    train, validation = text.load(str(folder), 16)
    models, optimizers = [], []
    for _ in range(replicas):
        with torch.device("meta"):
            model = gpt.GPT(gpt.Shape(256, num_layers=3, num_heads=4, width=40, mlp_width=44))
        initial.materialize(model, 0, torch.device("cpu"), torch.float64)
        matrices = {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": DECAY}
        others = {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}
        models.append(model)
        optimizers.append(torch.optim.AdamW([matrices, others], betas=(0.9, 0.95)))
    shared = [p.detach().clone() for p in models[0].parameters()]
    errors = [[torch.zeros_like(p) for p in shared] for _ in range(replicas)]
    outer = torch.optim.SGD(shared, lr=rate, momentum=momentum, nesterov=momentum > 0)
    order = sampler.permutation(len(train), 0, 0)
    every = np.arange(len(validation))
    losses, norms, held_out = [], [], {}
    for step in range(STEPS):
        of_replicas = np.split(order[step * BATCH : (step + 1) * BATCH], replicas)
        mean_loss = 0.0
        for model, optimizer, batch in zip(models, optimizers, of_replicas, strict=True):
            tokens, targets = train.read(np.zeros_like(batch), batch)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            norm = clip_and_step(model, optimizer, step, RATES["gpt"])
            mean_loss += loss.item() / replicas
            if model is models[0]:  # the log is that of rank 0
                norms.append(norm)
        losses.append(mean_loss)
        means = [torch.stack(ps).mean(0).detach() for ps in zip(*(m.parameters() for m in models), strict=True)]
        if (step + 1) % inner_steps == 0:
            for i, before in enumerate(shared):
                weights = [[*model.parameters()][i].detach() for model in models]
                arrive = [as_sent(before - w, own[i], compress) for w, own in zip(weights, errors, strict=True)]
                before.grad = sum(arrive[1:], arrive[0]).double() / replicas  # added up as they are sent
            outer.step()
            means = [before.clone() for before in shared]
            for model in models:
                torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(shared), model.parameters())
        if (step + 1) % EVAL_EVERY == 0 or step + 1 == STEPS:
            tokens, targets = validation.read(np.zeros_like(every), every)
            averaged = dict(zip(dict(models[0].named_parameters()), means, strict=True))
            logits = torch.func.functional_call(models[0], averaged, tokens).detach()
            held_out[step + 1] = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    return Curve(losses, norms, held_out)


def difference(folder: Path, out: Path, size: int, wanted: Curve, *flags: str, recipe: str | Path = RECIPE) -> float:
    """Largest relative difference of a run's losses, gradient norms and validation losses from the plain ones."""
    where = ("--data", str(folder), "--out", str(out), "--name", "run")
    result = runner.run_recipe(recipe, size, *FLAGS, *where, *flags, target=runner.run_unmeasured)
    assert result.ok, str(result)
    found = [runner.records(out / "run", tag) for tag in ("train/loss", "train/grad_norm", "val/loss")]
    assert found[2].keys() == wanted.held_out.keys()
    of_validation = max(abs(found[2][step] / value - 1) for step, value in wanted.held_out.items())
    return max(worst(found[0], wanted.losses, STEPS), worst(found[1], wanted.norms, STEPS), of_validation)


# Ranks, replicas, inner steps, and the outer step.
WAYS: dict[str, tuple[int, int, int, float, float]] = {
    "average after each step": (2, 2, 1, 1.0, 0.0),
    "outer momentum after each step": (2, 2, 1, 0.7, 0.9),
    "local SGD": (2, 2, 3, 1.0, 0.0),
    "three replicas": (3, 3, 3, 0.7, 0.9),
    "two replicas of two ranks": (4, 2, 3, 0.7, 0.9),
}


@pytest.mark.parametrize("way", WAYS)
def test_plain_loop(way: str, small_text: Path, tmp_path: Path) -> None:
    size, replicas, inner_steps, rate, momentum = WAYS[way]
    wanted = plain_loop(small_text, replicas, inner_steps, rate, momentum)
    flags = ("--replicas", str(replicas), "--inner-steps", str(inner_steps))
    flags += ("--outer-lr", str(rate), "--outer-momentum", str(momentum))
    assert difference(small_text, tmp_path, size, wanted, *flags) < 1e-9


MUTANTS: dict[str, mutants.Changes] = {
    "the outer momentum is forgotten": {
        "Outer": {"self.momentum[name].mul_(self.args.outer_momentum).add_(mean)": "mean.clone()"}
    },
    "heavy ball in place of Nesterov": {"Outer": {"mean + self.args.outer_momentum * momentum": "momentum"}},
    "a sum in place of the mean": {"Outer": {"sent.to(flat.dtype) / self.mesh.size()": "sent.to(flat.dtype)"}},
    "the outer step is one step late": {
        "Outer": {"self.steps % self.args.inner_steps == 0": "self.steps % self.args.inner_steps == 1"}
    },
    "each rank is evaluated as it is": {"forward_only": {"model.strategy.averaged()": "contextlib.nullcontext()"}},
    "replicas send their gradients": {"parallelize": {'mesh.get_group("dp")': "None"}},
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(mutant: str, small_text: Path, tmp_path: Path) -> None:
    wanted = plain_loop(small_text, 2, 3)
    path = mutants.mutate(RECIPE, tmp_path, MUTANTS[mutant])
    how = ("--inner-steps", "3", *OUTER, "--check-every", "0")
    assert difference(small_text, tmp_path, 2, wanted, *how, recipe=path) > 1e-6


def calls(folder: Path, size: int, *flags: str) -> list[tuple[str, int]]:
    """Kind and elements of the large calls of the third step."""
    flags = ("--num-layers", "2", "--width", "64", "--seq-len", "8", "--global-batch-size", "4", *flags)
    found = probes.in_ranks(probes.probe, RECIPE, size, list(flags), folder)
    return sorted((kind, elements) for kind, elements in found[0]["calls"] if elements >= 100)


def test_sends_all_differences_once_a_round(tmp_path: Path) -> None:
    """4 P / H bytes a step. A replica of one rank reduces its gradients with nobody, in DDP's buckets."""
    with torch.device("meta"):
        size = sum(p.numel() for p in gpt.GPT(gpt.Shape(256, num_layers=2, num_heads=4, width=64)).parameters())
    alone = calls(tmp_path / "between", 2, "--inner-steps", "4")
    assert {kind for kind, _ in alone} == {"all-reduce"}
    assert sum(elements for _, elements in alone) == size
    outer = [("all-reduce", size)]
    assert calls(tmp_path / "outer", 2, "--inner-steps", "3") == sorted(alone + outer)
    codes = [("all-gather", 2 * size)]
    assert calls(tmp_path / "int8", 2, "--inner-steps", "3", "--compress", "int8") == sorted(alone + codes)


def run(out: Path, size: int, data: Path, *flags: str, recipe: str | Path = RECIPE) -> dict[str, dict[int, float]]:
    """Run until it stops, in float32; returns the curves so far."""
    how = (*runner.small(RECIPE), "--data", str(data), "--dtype", "float32", "--global-batch-size", "24")
    how += ("--max-steps", "10", "--warmup-steps", "2", "--log-every", "1", "--save-every", "1000")
    where = ("--out", str(out.parent), "--name", out.name)
    result = runner.run_recipe(recipe, size, *how, *where, *flags, target=runner.run_unmeasured)
    assert result.ok, str(result)
    curves = {tag: runner.records(out, tag) for tag in ("train/loss", "train/grad_norm", "val/loss")}
    return curves | {"output": result.outputs[0]}  # type: ignore[dict-item]


ROUND = ("--inner-steps", "4", "--compress", "int8", *OUTER)


@pytest.mark.parametrize(("size", "replicas"), [(2, 2), (4, 2)])
def test_resume_in_mid_round_bitwise(size: int, replicas: int, small_text: Path, tmp_path: Path) -> None:
    """Weights and moments of each replica, what rounding took away, the outer momentum, the place in the round."""
    how = (*ROUND, "--replicas", str(replicas))
    whole = run(tmp_path / "whole", size, small_text, *how)
    for stop in ("3", "4", "6", "0"):
        parts = run(tmp_path / "parts", size, small_text, *how, "--stop-after", stop)
    for tag in ("train/loss", "train/grad_norm"):
        assert parts[tag] == whole[tag]
    last = "checkpoints/step_00000010"
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
    for stop in ("6", "0"):
        parts = run(tmp_path / "parts", 2, small_text, *ROUND, "--stop-after", stop, recipe=path)
    assert parts["train/loss"] != whole["train/loss"]


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
    assert [*back["train/loss"]] == [9, 10]


NO_ERRORS: mutants.Changes = {"Outer": {"error.copy_(one - sent)": "pass"}}
ONE_SCALE: mutants.Changes = {"Outer": {"every_scale.view(group.size(), -1)": "scales[None]"}}


@pytest.mark.parametrize(
    ("kind", "mutant"),
    [("bf16", {}), ("int8", {}), ("int8", NO_ERRORS), ("int8", ONE_SCALE)],
    ids=["bf16", "int8", "mutant: what rounding takes away is lost", "mutant: codes get this replica's scales"],
)
def test_compressed(kind: str, mutant: mutants.Changes, small_text: Path, tmp_path: Path) -> None:
    """Also with the roundings of what is sent, and with what they take away sent later."""
    wanted = plain_loop(small_text, 2, 3, compress=kind)
    path = mutants.mutate(RECIPE, tmp_path, mutant)
    how = ("--inner-steps", "3", *OUTER, "--compress", kind, "--check-every", "0")
    found = difference(small_text, tmp_path, 2, wanted, *how, recipe=path)
    assert found > 1e-6 if mutant else found < 1e-9
