"""moe_gpt with experts: a plain loop over all of them in one process, under every layout; moves, and exact resumes.

With `--experts 1` it is fsdp_gpt, so the tests of all recipes run it like that (`runner.layouts`).
"""

import json
import math
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common.train import initial, sampler
from common.workloads import gpt, text
from safetensors.torch import load_file, save_file
from tools.llama import convert
from tools.plan import counter
from torch import nn
from torch.nn import functional as F

from tests.harness import mutants, runner, states
from tests.harness.once import Once
from tests.recipes.conftest import SAMPLES
from tests.recipes.test_equivalence import CLIP, DECAY, RATES, WARMUP, clip_and_step, worst

RECIPE = "moe_gpt"
LAYERS, LENGTH = 2, 16
EVAL_EVERY = 3
DEAD = (1, 2)  # a layer, and an expert of it that no token chooses where `How.dead`
FAR = -100.0  # a bias that no score reaches


@dataclass(frozen=True)
class How:
    """What is trained, by the names of the recipe's flags; and the samples of a micro-batch over all ranks."""

    experts: int = 4
    top_k: int = 2
    shared_experts: int = 0
    router: str = "softmax"
    bias_rate: float = 0.01
    balance_loss: float = 0.5  # large, so that what is wrong in it shows
    balance: str = "step"
    z_loss: float = 0.1
    capacity_factor: float = 0.0
    batch: int = 24
    micro: int = 12
    dead: bool = False

    @property
    def steps(self) -> int:
        """Of the training."""
        return math.ceil(SAMPLES / self.batch)  # the ranks get unequal numbers of tokens of the last one

    def flags(self, dp_size: int) -> list[str]:
        """The same for the recipe on some ranks."""
        names = ("experts", "top_k", "shared_experts", "router", "bias_rate", "balance_loss", "balance", "z_loss")
        values = {name: getattr(self, name) for name in (*names, "capacity_factor")}
        values |= {"global_batch_size": self.batch, "lr_reference_batch": 2 * self.batch}
        values |= {"micro_batch_size": max(1, self.micro // dp_size), "num_layers": LAYERS}
        return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


class PlainMoe(nn.Module):
    """Every expert computes every token, and its result counts with the token's weight for it, which is mostly 0."""

    def __init__(self, shape: gpt.Shape, how: How) -> None:
        super().__init__()
        self.how = how
        self.router = nn.Linear(shape.width, how.experts, bias=False)
        self.experts = nn.ModuleDict({str(i): gpt.Mlp(shape) for i in range(how.experts)})
        wide = gpt.Shape(1, num_layers=1, num_heads=4, width=40, mlp_width=44 * max(1, how.shared_experts))
        self.shared = gpt.Mlp(wide) if how.shared_experts else None
        self.bias = torch.zeros(how.experts, dtype=torch.float64, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        how = self.how
        logits = self.router(x)
        scores = logits.softmax(-1) if how.router == "softmax" else logits.sigmoid()
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        ranked = (scores.detach() + self.bias).argsort(dim=-1, descending=True)
        chosen.scatter_(-1, ranked[..., : how.top_k], True)
        weights = scores * chosen
        weights = weights / weights.sum(-1, keepdim=True)
        takes = chosen.clone()
        if how.capacity_factor:
            most = math.ceil(how.capacity_factor * LENGTH * how.top_k / how.experts)
            for sequence in takes:
                for column in range(how.experts):
                    sequence[torch.nonzero(sequence[:, column]).flatten()[most:], column] = False
        # Of each sequence, as the micro-batches are made of sequences.
        self.counts = chosen.sum(1)  # (B, E)
        self.dropped = int(chosen.sum() - takes.sum())
        self.probabilities = (scores / scores.sum(-1, keepdim=True)).sum(1)
        self.z = logits.exp().sum(-1).log().square().mean()
        out = torch.zeros_like(x)
        for expert, module in self.experts.items():
            out = out + module(x) * (weights * takes)[..., int(expert), None]
        return out if self.shared is None else out + self.shared(x)

    def balance(self, parts: list[int]) -> torch.Tensor:
        """Of some sequences in parts, the mean of the parts' balance, by their sequences."""
        found = []
        for counts, probabilities in zip(self.counts.split(parts), self.probabilities.split(parts), strict=True):
            tokens = len(counts) * LENGTH
            shares = counts.sum(0) / (tokens * self.how.top_k)
            found.append(len(counts) * self.how.experts * (shares * probabilities.sum(0) / tokens).sum())
        return torch.stack(found).sum() / sum(parts)


@dataclass
class Curve:
    """What a training leaves behind, by step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    balance: list[float] = field(default_factory=list)
    z: list[float] = field(default_factory=list)
    counts: list[list[list[int]]] = field(default_factory=list)  # by layer and expert
    dropped: list[int] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)


def plain_loop(folder: str, how: How) -> Curve:
    """The training of a model with experts, as one would write it for one process and whole batches."""
    train, validation = text.load(folder, LENGTH)
    with torch.device("meta"):
        model = gpt.GPT(gpt.Shape(256, num_layers=LAYERS, num_heads=4, width=40, mlp_width=44))
        for block in model.blocks.values():
            block.mlp = PlainMoe(model.shape, how)
    initial.materialize(model, 0, torch.device("cpu"), torch.float64)
    layers: list[Any] = [block.mlp for block in model.blocks.values()]
    if how.dead:
        layers[DEAD[0]].bias[DEAD[1]] = FAR
    matrices = {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": DECAY}
    others = {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([matrices, others], betas=(0.9, 0.95))
    order = sampler.permutation(len(train), 0, 0)
    every = np.arange(len(validation))
    found = Curve()
    for step in range(how.steps):
        batch = order[step * how.batch : (step + 1) * how.batch]
        tokens, targets = train.read(np.zeros_like(batch), batch)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        number = math.ceil(len(batch) / how.micro) if how.balance == "micro" else 1
        parts = [len(part) for part in np.array_split(batch, number)]
        balance = sum(layer.balance(parts) for layer in layers) / LAYERS
        z = sum(layer.z for layer in layers) / LAYERS
        optimizer.zero_grad()
        (loss + how.balance_loss * balance + how.z_loss * z).backward()
        found.counts.append([layer.counts.sum(0).tolist() for layer in layers])
        found.dropped.append(sum(layer.dropped for layer in layers))
        found.norms.append(clip_and_step(model, optimizer, step, how.steps, RATES["gpt"]))
        found.losses.append(loss.item())
        found.balance.append(balance.item())
        found.z.append(z.item())
        for layer in layers if how.router == "sigmoid" else ():
            load = layer.counts.sum(0).double()
            layer.bias += how.bias_rate * torch.sign(load.mean() - load)
        if (step + 1) % EVAL_EVERY == 0 or (step + 1) * how.batch >= SAMPLES:
            tokens, targets = validation.read(np.zeros_like(every), every)
            found.held_out[step + 1] = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).item()
    return found


def train(
    out: Path, folder: Path, how: How, size: int, *flags: str, recipe: str | Path = RECIPE, target: Any = None
) -> Path:
    """Let the recipe, or a mutant of it, train on some ranks; returns the run's folder."""
    more = ["--epochs", "1", "--max-steps", "0", "--max-grad-norm", str(CLIP)]
    more += ["--lr", str(2 * RATES["gpt"]), "--weight-decay", str(DECAY), "--warmup-steps", str(WARMUP)]
    more += ["--log-every", "1", "--save-every", "1000", "--eval-every", str(EVAL_EVERY)]
    more += ["--dtype", "float64", "--check-every", "1"]
    more += ["--data", str(folder), "--out", str(out), "--name", "run", *how.flags(size)]
    if how.dead:
        bias = torch.zeros(how.experts, dtype=torch.float64)
        bias[DEAD[1]] = FAR
        save_file({f"blocks.{DEAD[0]}.mlp.balance_bias": bias}, out / "bias.safetensors")
        more += ["--init", str(out / "bias.safetensors")]
    result = runner.run_recipe(recipe, size, *runner.small(RECIPE), *more, *flags, target=target)
    assert result.ok, str(result)
    if how.dead:
        assert f"no token has chosen expert {DEAD[1]} of blocks.{DEAD[0]} in the last 1 steps" in str(result)
    return out / "run"


def counts_of(run: Path, how: How) -> list[list[list[int]]]:
    """How many tokens have chosen each expert in each step, by layer."""
    logs = [[runner.records(run, f"load/{i}/{j}") for j in range(how.experts)] for i in range(LAYERS)]
    found = []
    for step in range(1, how.steps + 1):
        samples = min(how.batch, SAMPLES - (step - 1) * how.batch)
        share = samples * LENGTH * how.top_k / how.experts
        exact = [[one[step] * share for one in layer] for layer in logs]
        assert all(abs(one - round(one)) < 1e-6 for layer in exact for one in layer)
        found.append([[round(one) for one in layer] for layer in exact])
    return found


def compare(run: Path, wanted: Curve, how: How) -> None:
    """Each loss, norm and load is that of the plain loop."""
    curves = {"loss": wanted.losses, "grad_norm": wanted.norms}
    curves |= {"balance_loss": wanted.balance} if how.balance_loss else {}
    curves |= {"z_loss": wanted.z} if how.z_loss else {}
    for tag, values in curves.items():
        assert worst(runner.records(run, f"train/{tag}"), values, how.steps) < 1e-9, tag
    assert counts_of(run, how) == wanted.counts
    assert runner.records(run, "val/loss") == pytest.approx(wanted.held_out, rel=1e-9)
    most = [max(n * how.experts / sum(row) for row in layers for n in row) for layers in wanted.counts]
    assert worst(runner.records(run, "train/load_max"), most, how.steps) < 1e-9
    dropped = runner.records(run, "train/dropped")
    if not how.capacity_factor:
        assert not dropped
        return
    for step, number in enumerate(wanted.dropped, 1):
        choices = LAYERS * LENGTH * how.top_k * min(how.batch, SAMPLES - (step - 1) * how.batch)
        assert dropped[step] * choices == pytest.approx(number, abs=1e-6)


SIGMOID = How(router="sigmoid", shared_experts=2)
CAPACITY = How(capacity_factor=1.0)
MICRO = How(balance="micro")
WHOLE = How(micro=24)
FOUR = How(micro=6)  # micro-batches of a step
FEW_LEFT = How(batch=52, micro=52)  # the last step has five samples, of which one rank gets two
DEAD_ONE = How(router="sigmoid", balance_loss=0.0, dead=True)
GATHER = ("--ep-kind", "gather")
HSDP = ("--dp-replicate", "2")
# By name: number of ranks, what is trained, and flags.
LAYOUTS: dict[str, tuple[int, How, tuple[str, ...]]] = {
    "ep 2, gathered, with capacity": (2, CAPACITY, ("--ep", "2", *GATHER)),
    "ep 2 x 2, sigmoid and shared": (4, SIGMOID, ("--ep", "2")),
    "ep 2": (2, How(), ("--ep", "2")),
    "ep 2 x 2, each micro-batch balanced": (4, MICRO, ("--ep", "2")),
    "one process": (1, How(), ()),
    "one process, whole": (1, WHOLE, ()),
    "one process, each micro-batch balanced": (1, MICRO, ()),
    "one process, with capacity": (1, CAPACITY, ()),
    "one process, sigmoid and shared": (1, SIGMOID, ()),
    "ep 1 of 2": (2, How(), ("--ep", "1")),
    "ep 1 of 2, whole": (2, WHOLE, ("--ep", "1")),
    "ep 1 of 2, each micro-batch balanced": (2, MICRO, ("--ep", "1")),
    "ep 1 of 3": (3, How(), ("--ep", "1")),
    "ep 1 of 3, with capacity": (3, CAPACITY, ("--ep", "1")),
    "ep 1 of 4, sigmoid and shared": (4, SIGMOID, ("--ep", "1")),
    "ep 2, whole": (2, WHOLE, ("--ep", "2")),
    "ep 2, gathered": (2, How(), ("--ep", "2", *GATHER)),
    "ep 2, with capacity": (2, CAPACITY, ("--ep", "2")),
    "ep 2, each micro-batch balanced, gathered": (2, MICRO, ("--ep", "2", *GATHER)),
    "ep 2, four micro-batches": (2, FOUR, ("--ep", "2")),
    "ep 2, an expert without tokens": (2, DEAD_ONE, ("--ep", "2")),
    "ep 2, an expert without tokens, gathered": (2, DEAD_ONE, ("--ep", "2", *GATHER)),
    "ep 2, kept gathered": (2, How(), ("--ep", "2", "--no-reshard-after-forward")),
    "ep 2, computed again": (2, How(), ("--ep", "2", "--recompute", "full")),
    "ep 2 x 2, computed again, but for products": (4, How(), ("--ep", "2", "--recompute", "selective")),
    "ep 3": (3, How(experts=6, top_k=3), ("--ep", "3")),
    "ep 3, gathered, one of three": (3, How(experts=3, top_k=1), ("--ep", "3", *GATHER)),
    "ep 4": (4, How(), ("--ep", "4")),
    "ep 4, gathered": (4, How(), ("--ep", "4", *GATHER)),
    "ep 4, eight experts": (4, How(experts=8), ("--ep", "4")),
    "ep 4, tight capacity": (4, How(capacity_factor=0.5), ("--ep", "4")),
    "ep 4, each micro-batch balanced, four of them": (4, How(balance="micro", micro=8), ("--ep", "4")),
    "ep 4, an expert without tokens": (4, DEAD_ONE, ("--ep", "4")),
    "ep 4, a rank with twice the tokens": (4, FEW_LEFT, ("--ep", "4")),
    "ep 4, a rank with twice the tokens, gathered": (4, FEW_LEFT, ("--ep", "4", *GATHER)),
    "ep 2 x 2": (4, How(), ("--ep", "2")),
    "ep 2 x 2, gathered": (4, SIGMOID, ("--ep", "2", *GATHER)),
    "hsdp, ep 1": (4, How(), (*HSDP, "--ep", "1")),
    "hsdp, ep 2": (4, How(), (*HSDP, "--ep", "2")),
    "hsdp, ep 2, with capacity": (4, CAPACITY, (*HSDP, "--ep", "2")),
    "hsdp, ep 2, each micro-batch balanced, gathered": (4, MICRO, (*HSDP, "--ep", "2", *GATHER)),
    "hsdp of single ranks": (2, How(), HSDP),
    "no losses of the router": (2, How(balance_loss=0.0, z_loss=0.0), ("--ep", "2")),
}


def plain_curve(once: Once, folder: Path, how: How) -> Curve:
    """Of the plain loop, computed once."""
    return once.value(lambda: plain_loop(str(folder), how), "plain loop over experts", how)


@pytest.mark.parametrize("name", LAYOUTS)
def test_float64(name: str, once: Once, epoch_text: Path, tmp_path: Path) -> None:
    size, how, flags = LAYOUTS[name]
    wanted = plain_curve(once, epoch_text, how)
    assert min(wanted.norms) > CLIP, "clipping must have an effect"
    assert any(wanted.dropped) == bool(how.capacity_factor)
    assert not how.dead or not any(layers[DEAD[0]][DEAD[1]] for layers in wanted.counts)
    compare(train(tmp_path, epoch_text, how, size, *flags), wanted, how)


def test_balance_of_micro_batches_is_another_one(once: Once, epoch_text: Path) -> None:
    """What follows would prove nothing if both kinds were the same."""
    step, micro = (plain_curve(once, epoch_text, how).balance for how in (How(), MICRO))
    assert min(abs(one - other) for one, other in zip(step, micro, strict=True)) > 1e-5


WEIGHTED = {
    "forward": {
        '{"loss": losses.sum(), "count": torch.full((), len(losses), device=losses.device), **more}': (
            '{"loss": 5 * losses.sum(), "weight": torch.full((), 5.0 * len(losses)),'
            ' "count": torch.full((), len(losses), device=losses.device)}'
        )
    }
}


@pytest.mark.rest
@pytest.mark.parametrize("how", [How(), How(balance="micro", micro=24)], ids=["step", "micro"])
def test_weights_of_samples_leave_the_losses_of_the_router(
    how: How, once: Once, epoch_text: Path, tmp_path: Path
) -> None:
    """Of a forward that returns "weight", all gradients are divided by its mean; the router's are means over tokens."""
    mutant = mutants.mutate(RECIPE, tmp_path, WEIGHTED)
    run = train(tmp_path, epoch_text, how, 2, "--ep", "2", recipe=mutant)
    compare(run, plain_curve(once, epoch_text, how), how)


def test_weights_that_are_not_known_yet_are_refused(epoch_text: Path, tmp_path: Path) -> None:
    mutant = mutants.mutate(RECIPE, tmp_path, WEIGHTED)
    flags = [*runner.small(RECIPE), *MICRO.flags(1), "--data", str(epoch_text), "--out", str(tmp_path)]
    result = runner.run_recipe(mutant, 1, *flags)
    assert not result.ok
    assert 'forward returns "weight": with several micro-batches, use --balance step' in str(result)


@pytest.mark.rest
def test_compiled(once: Once, epoch_text: Path, tmp_path: Path) -> None:
    """The code around the experts is traced, forward and backward."""
    wanted = plain_curve(once, epoch_text, SIGMOID)
    run = train(tmp_path, epoch_text, SIGMOID, 2, "--ep", "2", "--compile", target=runner.run_traced)
    compare(run, wanted, SIGMOID)


@pytest.mark.parametrize(("kind", "waits"), [("exchange", 1), pytest.param("gather", 2, marks=pytest.mark.rest)])
def test_a_layer_waits_once_and_sends_its_choices_twice(kind: str, waits: int) -> None:
    """And their gradients, where the load is balanced; an all-gather needs to know the sizes first."""
    width, sequences = 64, 8
    flags = ["--num-layers", "2", "--width", str(width), "--num-heads", "4", "--seq-len", "64", "--ep-kind", kind]
    flags += ["--ep", "2", "--global-batch-size", str(4 * sequences), "--dtype", "bfloat16"]
    case = {"folder": str(runner.ROOT / "recipes" / RECIPE), "size": 4, "flags": flags, "only_step": True}
    found = json.loads(counter.in_child(case))
    assert "error" not in found, found
    assert sum(found["step"]["syncs"].values()) == 2 * waits
    assert found["parameters"] - found["active"] == 2 * 6 * 3 * width * 192, "of two layers, six of eight experts"
    sent = {(one["kind"], one["axis"]): one["bytes"] for one in found["step"]["traffic"]}
    rows = 2 * sequences * 64  # two choices of each token
    numbers = 2 * 8 * 8  # of two layers, for eight experts each
    if kind == "exchange":
        assert sent["all-to-all", "ep"] == 2 * 2 * 2 * rows * width * 2 + numbers
    else:
        assert "all-to-all" not in {name for name, _ in sent}


@pytest.mark.rest
@pytest.mark.parametrize(("gpu", "waits"), [("NVIDIA H100 80GB HBM3", 0), ("NVIDIA A100-SXM4-80GB", 1)])
def test_a_layer_waits_without_an_exchange_only_where_products_are_not_grouped(gpu: str, waits: int) -> None:
    flags = ["--num-layers", "2", "--width", "64", "--num-heads", "4", "--ep", "1", "--dtype", "bfloat16"]
    case = {"folder": str(runner.ROOT / "recipes" / RECIPE), "size": 2, "flags": flags, "only_step": True, "gpu": gpu}
    found = json.loads(counter.in_child(case))
    assert sum(found["step"]["syncs"].values()) == 2 * waits, found


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["ep 2", "ep 2 x 2", "hsdp, ep 2"])
def test_muon_and_averages_are_those_of_one_process(kind: str, once: Once, epoch_text: Path, tmp_path: Path) -> None:
    """Each matrix is orthogonalised by a rank of those that share it, and each rank averages its own experts."""
    more = ("--optimizer", "muon", "--ema", "0.5")
    alone = once.folder(lambda out: train(out, epoch_text, MOVED, 1, *more), "moe by muon") / "run"
    size, flags = KINDS[kind]
    run = train(tmp_path, epoch_text, MOVED, size, *flags, *more)
    for tag in ("train/loss", "train/grad_norm", "val/loss"):
        assert runner.records(run, tag) == pytest.approx(runner.records(alone, tag), rel=1e-9), tag
    wanted = plain_curve(once, epoch_text, MOVED).held_out
    assert abs(runner.records(run, "val/loss")[MOVED.steps] - wanted[MOVED.steps]) > 0.01, "AdamW has another loss"


# --- Checkpoints --------------------------------------------------------------------------------------------

# With biases, which are buffers; and as many steps as there are ways to deal out the experts, and one more.
MOVED = How(router="sigmoid", shared_experts=1, capacity_factor=1.0, batch=16, micro=8)
KINDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one process": (1, ()),
    "ep 1 of 3": (3, ("--ep", "1")),
    "ep 2": (2, ("--ep", "2")),
    "ep 2 x 2": (4, ("--ep", "2")),
    "ep 4": (4, ("--ep", "4", *GATHER)),
    "hsdp, ep 2": (4, (*HSDP, "--ep", "2")),
}


def curve_of(run: Path) -> dict[str, dict[int, float]]:
    """Losses and norms that a run has recorded."""
    return {tag: runner.records(run, f"train/{tag}") for tag in ("loss", "grad_norm", "balance_loss")}


def check_moved(found: dict[str, dict[int, float]], wanted: Curve, steps: list[int]) -> None:
    for tag, values in (("loss", wanted.losses), ("grad_norm", wanted.norms), ("balance_loss", wanted.balance)):
        assert list(found[tag]) == steps
        assert max(abs(found[tag][step] / values[step - 1] - 1) for step in steps) < 1e-9, tag


WAYS = {  # a plain `pytest` has the first
    "some": ["ep 2", "one process", "ep 2"],
    "all": [*KINDS, "one process"],
    "all, backwards": [*reversed(KINDS), "hsdp, ep 2"],
}


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way == "some" else pytest.mark.rest) for way in WAYS])
def test_one_training_through_kinds(way: str, once: Once, epoch_text: Path, tmp_path: Path) -> None:
    """Each goes on where another one has stopped: weights, moments and biases."""
    for step, kind in enumerate(WAYS[way], 1):
        size, flags = KINDS[kind]
        run = train(tmp_path, epoch_text, MOVED, size, *flags, "--stop-after", str(step))
    check_moved(curve_of(run), plain_curve(once, epoch_text, MOVED), [*range(1, len(WAYS[way]) + 1)])


@pytest.mark.parametrize("kind", ["one process", "ep 2", "ep 2 x 2", "hsdp, ep 2"])
def test_resumes_bitwise(kind: str, epoch_text: Path, tmp_path: Path) -> None:
    size, flags = KINDS[kind]
    (tmp_path / "parts").mkdir()
    how = (*flags, "--dtype", "float32")
    whole = train(tmp_path, epoch_text, MOVED, size, *how)
    for stop in (3, MOVED.steps):
        parts = train(tmp_path / "parts", epoch_text, MOVED, size, *how, "--stop-after", str(stop))
    assert curve_of(parts) == curve_of(whole)
    last = f"checkpoints/step_{MOVED.steps:08d}"
    assert states.same_tensors(parts / last, whole / last)


KILLED = {
    "mix_by_exchange": {
        "rows = Exchange.apply(rows, given, taken, group)": (
            'mix_by_exchange.calls = getattr(mix_by_exchange, "calls", 0) + 1\n'
            "if mix_by_exchange.calls == 40 and group.rank() == 1:\n"
            '    __import__("os").kill(__import__("os").getpid(), 9)\n'
            "rows = Exchange.apply(rows, given, taken, group)"
        )
    }
}


def test_rank_that_dies_in_an_exchange_is_named(epoch_text: Path, tmp_path: Path) -> None:
    """The other one waits for its rows, knows how many would come, and gets none."""
    mutant = mutants.mutate(RECIPE, tmp_path, KILLED)
    flags = [*runner.small(RECIPE), *How().flags(2), "--ep", "2", "--log-every", "1", "--hang-timeout", "6"]
    result = runner.run_recipe(mutant, 2, *flags, "--data", str(epoch_text), "--out", str(tmp_path))
    assert result.codes[1] == -signal.SIGKILL, str(result)
    assert result.codes[0] > 0
    assert re.search(r"last heartbeat of rank 1 \(host .*, pid \d+, step [2-9]\): ", result.outputs[0]), str(result)


def test_model_without_experts_is_another_one(epoch_text: Path, tmp_path: Path) -> None:
    """A checkpoint with experts does not fit into fsdp_gpt, which says what differs."""
    run = train(tmp_path, epoch_text, How(), 1, "--stop-after", "1")
    flags = [*runner.small(RECIPE), "--num-layers", str(LAYERS), "--data", str(epoch_text), "--out", str(tmp_path)]
    result = runner.run_recipe("fsdp_gpt", 1, *flags, "--resume", str(run))
    assert not result.ok
    assert "blocks.0.mlp.experts.0.down.weight" in str(result) or "blocks.0.mlp.gate.weight" in str(result)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--ep", "3"), "--ep 3 must divide --experts (4)"),
        (("--ep", "4"), "--ep 4 must divide the ranks that hold the model (2)"),
        (("--top-k", "5"), "--top-k 5 must be at most --experts 4"),
        (("--experts", "1", "--shared-experts", "2"), "--shared-experts 2 needs --experts 2 or more"),
    ],
)
def test_refusals(flags: tuple[str, ...], message: str, epoch_text: Path, tmp_path: Path) -> None:
    where = ("--data", str(epoch_text), "--out", str(tmp_path), "--experts", "4")
    result = runner.run_recipe(RECIPE, 2, *runner.small(RECIPE), *where, *flags)
    assert not result.ok
    assert message in str(result)


# --- Hugging Face -------------------------------------------------------------------------------------------


def make_mixtral(folder: Path) -> Any:
    """A small Mixtral of transformers, with a router that is sure of its choices."""
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 40, "intermediate_size": 44, "num_hidden_layers": LAYERS}
    sizes |= {"vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}
    sizes |= {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, experts_implementation="eager"))
    with torch.no_grad():
        for name, one in model.named_parameters():
            one.mul_(50 if "gate.weight" in name else 10 if one.ndim > 1 else 1)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as the export means it
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "ep 2" else pytest.mark.rest) for kind in KINDS]
)
def test_init_takes_a_mixtral(kind: str, epoch_text: Path, tmp_path: Path) -> None:
    """The first loss is that of transformers, and what training at rate 0 leaves has its bits when it is exported."""
    theirs = make_mixtral(tmp_path / "mixtral")
    how, (size, flags) = How(), KINDS[kind]
    more = ("--init", str(tmp_path / "mixtral"), "--stop-after", "1", "--lr", "0", "--dtype", "float32")
    run = train(tmp_path, epoch_text, how, size, *flags, *more)
    split, _ = text.load(str(epoch_text), LENGTH)
    batch = sampler.permutation(len(split), 0, 0)[: how.batch]
    tokens, targets = split.read(np.zeros_like(batch), batch)
    wanted = F.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten()).item()
    assert wanted > 6, "a random model of INIT_STD has about 5.5"
    assert runner.records(run, "train/loss") == {1: pytest.approx(wanted, rel=1e-5)}
    convert.export(run, tmp_path / "out")
    (before, after) = (load_file(tmp_path / name / "model.safetensors") for name in ("mixtral", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("recipe", "flags", "refusal"),
    [
        (RECIPE, ("--experts", "8", "--top-k", "1"), "--experts 8 must be 4, --top-k 1 must be 2"),
        (RECIPE, ("--experts", "1"), "--experts 1 must be 4"),
        (RECIPE, ("--experts", "4", "--router", "sigmoid"), "--router sigmoid must be softmax"),
        (RECIPE, ("--experts", "4", "--shared-experts", "1"), "--shared-experts 1 must be 0"),
        ("fsdp_gpt", (), "model_type 'mixtral', with a mixture of experts: it must be one of llama"),
    ],
)
def test_another_mixtral_is_refused(
    recipe: str, flags: tuple[str, ...], refusal: str, epoch_text: Path, tmp_path: Path
) -> None:
    make_mixtral(tmp_path / "mixtral")
    where = ("--data", str(epoch_text), "--out", str(tmp_path), "--init", str(tmp_path / "mixtral"))
    result = runner.run_recipe(recipe, 1, *runner.small(RECIPE), "--num-layers", str(LAYERS), *where, *flags)
    assert not result.ok
    assert refusal in str(result)
