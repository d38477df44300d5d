"""Every strategy gives the numbers of a plain single-process loop: same seed, same global batch, same curve."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from common import seed
from common.train import initial, sampler
from common.workloads import gpt, images, text
from common.workloads.resnet import make_resnet
from torch.nn import functional as F

from tests.conftest import each_recipe
from tests.harness import mutants, runner, short_resnet  # noqa: F401 (--model resnet6)
from tests.harness.once import Once

# One epoch: 4 steps of 24, in two micro-batches each, and a last one of 13, which divides by none of 2, 3 and 4.
# Augmentation, weight decay, warm-up, clipping at a norm that every step exceeds, and an evaluation in the middle,
# which the steps after it must not notice.
BATCH = 24
MICRO_BATCH = 12  # over all ranks
STEPS = 5
EVAL_EVERY = 3
CLIP = 0.25
WARMUP = 2
DECAY = 5e-4
SMOOTHING = 0.1
RATES = {"resnet": 0.1, "gpt": 0.005}  # Adam's step is as long as its rate, however small the gradient
FLAGS = [
    *("--epochs", "1", "--max-steps", "0", "--global-batch-size", str(BATCH), "--max-grad-norm", str(CLIP)),
    *("--lr-reference-batch", str(2 * BATCH), "--weight-decay", str(DECAY)),
    *("--warmup-steps", str(WARMUP), "--log-every", "1", "--save-every", "1000"),
    *("--eval-every", str(EVAL_EVERY)),
]


class Curve(NamedTuple):
    """What a training leaves behind."""

    losses: list[float]  # of each step
    norms: list[float]  # of the gradient
    held_out: dict[int, float]  # loss on the validation split after some of the steps


def plain_resnet_loop(folder: str, dtype: torch.dtype, name: str = "resnet6", stop_after: int = STEPS) -> Curve:
    """The training, as one would write it for one process."""
    train, validation = images.load(folder, run_seed=0, flip=False)
    seed.everything(0, seed.INIT)
    model = make_resnet(name, 1, 10, 8).to(dtype)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.SGD([{"params": decayed, "weight_decay": DECAY}, {"params": others}], momentum=0.9)
    order = sampler.permutation(len(train), 0, 0)
    every = np.arange(len(validation))
    steps = math.ceil(len(train) / BATCH)
    losses, norms, held_out = [], [], {}
    for step in range(stop_after):
        batch = order[step * BATCH : (step + 1) * BATCH]
        loss = torch.zeros((), dtype=dtype)
        for part in np.array_split(batch, 2):  # BatchNorm sees a micro-batch at a time: they are part of the maths
            pixels, labels = train.read(np.zeros_like(part), part)
            logits = model(pixels.to(dtype) / 127.5 - 1)
            loss = loss + F.cross_entropy(logits, labels, reduction="sum", label_smoothing=SMOOTHING)
        loss = loss / len(batch)
        optimizer.zero_grad()
        loss.backward()
        norms.append(clip_and_step(model, optimizer, step, steps, RATES["resnet"]))
        losses.append(loss.item())
        if (step + 1) % EVAL_EVERY == 0 or step + 1 == steps:
            pixels, labels = validation.read(np.zeros_like(every), every)
            logits = model.eval()(pixels.to(dtype) / 127.5 - 1)
            held_out[step + 1] = F.cross_entropy(logits, labels, label_smoothing=SMOOTHING).item()
            model.train()
    return Curve(losses, norms, held_out)


def plain_gpt_loop(
    folder: str,
    dtype: torch.dtype,
    sizes: tuple[tuple[str, Any], ...] = (),
    tied: bool = False,
    parts: tuple[tuple[str, float], ...] = (),
    moved: Callable[[torch.nn.Module, torch.optim.Optimizer], torch.optim.Optimizer] = lambda _, adamw: adamw,
    read: tuple[str, ...] = (),
) -> Curve:
    """The same for a language model; `moved` exchanges the optimizer, and `read` is how `text.load` reads a table."""
    shape = {"num_layers": 3, "num_heads": 4, "width": 40, "mlp_width": 44, "seq_len": 16} | dict(sizes)
    train, validation = text.load(folder, shape.pop("seq_len"), *read)
    with torch.device("meta"):
        model = gpt.GPT(gpt.Shape(train.vocab_size, **shape, tied=tied))
    initial.materialize(model, 0, torch.device("cpu"), dtype)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    for part, of_part in parts:
        for parameter in model.get_submodule(part).parameters():
            groups = [group | {"params": [p for p in group["params"] if p is not parameter]} for group in groups]
            groups.append({"params": [parameter], "weight_decay": DECAY * (parameter.ndim > 1), "factor": of_part})
            parameter.requires_grad_(of_part > 0)
    optimizer = moved(model, torch.optim.AdamW(groups, betas=(0.9, 0.95)))
    order = sampler.permutation(len(train), 0, 0)
    every = np.arange(len(validation))
    steps = math.ceil(len(train) / BATCH)
    losses, norms, held_out = [], [], {}
    for step in range(steps):
        batch = order[step * BATCH : (step + 1) * BATCH]
        tokens, targets = train.read(np.zeros_like(batch), batch)
        loss = mean_loss(model, tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        norms.append(clip_and_step(model, optimizer, step, steps, RATES["gpt"]))
        losses.append(loss.item())
        if (step + 1) % EVAL_EVERY == 0 or step + 1 == steps:
            tokens, targets = validation.read(np.zeros_like(every), every)
            held_out[step + 1] = mean_loss(model, tokens, targets).item()
    return Curve(losses, norms, held_out)


def mean_loss(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Over the tokens that count; documents that are kept apart are computed one by one."""
    if tokens.ndim == 2:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    total = torch.zeros((), dtype=next(model.parameters()).dtype)
    for (row, positions), wanted in zip(tokens, targets, strict=True):
        begins = [*np.flatnonzero(positions == 0), len(row)]
        for begin, end in itertools.pairwise(begins):
            logits = model(row[None, begin:end])[0]
            total = total + F.cross_entropy(logits, wanted[begin:end], reduction="sum")
    return total / (targets != -100).sum()


def clip_and_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, steps: int, rate: float
) -> float:
    """Clip, set the rate and update; returns the gradient norm."""
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([parameter.grad.norm() for parameter in trained]))
    for parameter in trained:
        parameter.grad *= min(1.0, CLIP / (norm.item() + 1e-6))
    factor = (step + 1) / (WARMUP + 1)
    if step >= WARMUP:
        factor = 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP)))
    for group in optimizer.param_groups:
        group["lr"] = rate * factor * group.get("factor", 1.0)
    optimizer.step()
    return norm.item()


PLAIN_LOOPS = {"resnet": plain_resnet_loop, "gpt": plain_gpt_loop}


def plain_curve(once: Once, recipe: str, dtype: str, folder: Path, *how: Any) -> Curve:
    """Of the plain loop, computed once."""
    workload = runner.workload(recipe)
    loop = PLAIN_LOOPS[workload]
    return once.value(lambda: loop(str(folder), getattr(torch, dtype), *how), "plain", workload, dtype, *how)


def curves(
    layout: runner.Layout, out: Path, *flags: str, mutant: Path | None = None, target: Callable | None = None
) -> list[dict[int, float]]:
    """Loss, gradient norm and validation loss by step of a run of a recipe, or of a mutant of one."""
    sync = ("--sync-bn",) if runner.has_flag(layout.recipe, "--sync-bn") else ()
    rate = ("--lr", str(2 * RATES[runner.workload(layout.recipe)]))
    flags = (*runner.small(layout.recipe), *rate, *layout.flags, *layout.micro_batches(MICRO_BATCH), *sync, *flags)
    where = ("--out", str(out), "--name", "run")
    result = runner.run_recipe(mutant or layout.recipe, layout.size, *FLAGS, *where, *flags, target=target)
    assert result.ok, str(result)
    return [runner.records(out / "run", tag) for tag in ("train/loss", "train/grad_norm", "val/loss")]


def worst(found: dict[int, float], wanted: list[float], steps: int = STEPS) -> float:
    """Largest relative difference between a recorded curve and the plain one."""
    assert list(found) == list(range(1, steps + 1)), "every step is recorded once"
    return max(abs(value - wanted[step - 1]) / abs(wanted[step - 1]) for step, value in found.items())


def ways() -> Iterator[Any]:
    """Every layout of every recipe; of a pipeline, also with an embedding and an output layer that are one tensor.

    Tied, those layouts that have what the others lack: a rank that holds neither of the two, and several pipelines. A
    plain `pytest` runs the first one of each recipe on two ranks. The recipe that trains on no data set is in
    tests/recipes/test_ppo.py.
    """
    for layout in (layout for recipe in runner.SUPERVISED for layout in runner.layouts(recipe)):
        stages = layout.size // layout.dp_size if "--pp" in layout.flags else 0
        for tied in [(), (True,)] if stages == 3 or (stages > 0 and layout.dp_size > 1) else [()]:
            core = layout == runner.layout(layout.recipe, 2) and not tied
            marks = () if core else pytest.mark.rest
            yield pytest.param(layout, tied, id=f"{layout}{'-tied' * len(tied)}", marks=marks)


@pytest.mark.parametrize(("layout", "tied"), list(ways()))
def test_float64(layout: runner.Layout, tied: tuple, once: Once, epochs: dict[str, Path], tmp_path: Path) -> None:
    folder = epochs[runner.workload(layout.recipe)]
    flags = ("--data", str(folder), "--dtype", "float64")
    how = (layout.sizes, *tied) if layout.sizes or tied else ()
    wanted = plain_curve(once, layout.recipe, "float64", folder, *how)
    assert len(wanted.losses) == STEPS
    assert min(wanted.norms) > CLIP, "clipping must have an effect"
    found = curves(layout, tmp_path, *flags, *("--tied" for _ in tied))
    assert worst(found[0], wanted.losses) < 1e-9
    assert worst(found[1], wanted.norms) < 1e-9
    assert found[2] == pytest.approx(wanted.held_out, rel=1e-9)
    assert list(found[2]) == [EVAL_EVERY, STEPS]


# How far the steps may be off. bfloat16 is what `--dtype auto` takes where the hardware has it: computed with 8 bits,
# but stored and added up with more.
COARSE = {"bfloat16": 0.02}


@pytest.mark.parametrize("dtype", COARSE)
@pytest.mark.parametrize("recipe", each_recipe(runner.SUPERVISED))
def test_coarser(recipe: str, dtype: str, once: Once, epochs: dict[str, Path], tmp_path: Path) -> None:
    folder = epochs[runner.workload(recipe)]
    layout = runner.layout(recipe, 2)
    wanted = plain_curve(once, recipe, "float32", folder, *([layout.sizes] if layout.sizes else []))
    found = curves(layout, tmp_path, "--data", str(folder), "--dtype", dtype)
    assert worst(found[0], wanted.losses) < COARSE[dtype]
    assert found[2] == pytest.approx(wanted.held_out, rel=COARSE[dtype])


# Recipe, further flags, and what they change in the model.
VARIANTS: dict[str, tuple[str, tuple[str, ...], tuple[tuple[str, int], ...]]] = {
    "blocks are computed twice, and stay gathered": (
        *("fsdp_gpt", ("--recompute", "full", "--no-reshard-after-forward"), ()),
    ),
    "blocks are computed twice, but for products": ("fsdp_gpt", ("--recompute", "selective"), ()),
    "sliced blocks are computed twice": ("tensor_gpt", ("--recompute", "full"), ()),
    "sliced blocks are computed twice, but for products": ("tensor_gpt", ("--recompute", "selective"), ()),
    "stages are computed twice": ("pipeline_gpt", ("--recompute", "full"), ()),
    "stages are computed twice, but for products": ("pipeline_gpt", ("--recompute", "selective"), ()),
    "stages with two backward passes are computed twice": (
        *("pipeline_gpt", ("--schedule", "InterleavedZeroBubble", "--num-layers", "5", "--recompute", "full"), ()),
    ),
    "replicas are computed twice, but for products": ("ddp_gpt", ("--recompute", "selective"), ()),
    "stages whose heads share keys and values": ("pipeline_gpt", ("--num-kv-heads", "1"), (("num_kv_heads", 1),)),
}


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=[pytest.mark.rest] * (name == "sliced blocks are computed twice")) for name in VARIANTS],
)
def test_variant(variant: str, once: Once, epochs: dict[str, Path], tmp_path: Path) -> None:
    recipe, flags, sizes = VARIANTS[variant]
    layout = runner.layout(recipe, 2)
    wanted = plain_curve(once, recipe, "float64", epochs["gpt"], (*layout.sizes, *sizes))
    found = curves(layout, tmp_path, "--data", str(epochs["gpt"]), "--dtype", "float64", *flags)
    assert worst(found[0], wanted.losses) < 1e-9
    assert worst(found[1], wanted.norms) < 1e-9


# What a Qwen or a Llama 3 has and the default model has not, in one model, with its flags.
OPTIONS = (("num_kv_heads", 2), ("head_width", 6), ("qkv_bias", True), ("qk_norm", True))
OPTIONS += (("rope_scaling", "llama3:4:1:4:40"),)
OPTION_FLAGS = ("--num-kv-heads", "2", "--head-width", "6", "--qkv-bias", "--qk-norm")
OPTION_FLAGS += ("--rope-scaling", "llama3:4:1:4:40")


@pytest.mark.parametrize("recipe", [name for name in runner.SUPERVISED if runner.has_flag(name, "--qk-norm")])
def test_options(recipe: str, once: Once, epochs: dict[str, Path], tmp_path: Path) -> None:
    layout = runner.layout(recipe, 2)
    layout = dataclasses.replace(layout, flags=layout.strategy)  # one plain loop for all
    wanted = plain_curve(once, recipe, "float64", epochs["gpt"], OPTIONS)
    found = curves(layout, tmp_path, "--data", str(epochs["gpt"]), "--dtype", "float64", *OPTION_FLAGS)
    assert worst(found[0], wanted.losses) < 1e-9
    assert worst(found[1], wanted.norms) < 1e-9
    assert found[2] == pytest.approx(wanted.held_out, rel=1e-9)


# A first stage of a pipeline that learns nothing, and a head that learns faster.
PARTS = (("embed", 0.0), ("blocks.0", 0.0), ("blocks.1", 0.0), ("head", 3.0))


@pytest.mark.parametrize("recipe", each_recipe([name for name in runner.SUPERVISED if runner.workload(name) == "gpt"]))
def test_rates_of_parts(recipe: str, once: Once, epochs: dict[str, Path], tmp_path: Path) -> None:
    layout = runner.layout(recipe, 2)
    layout = dataclasses.replace(layout, flags=layout.strategy)
    wanted = plain_curve(once, recipe, "float64", epochs["gpt"], (), False, PARTS)
    rates = ",".join(f"{part}={factor}" for part, factor in PARTS)
    found = curves(layout, tmp_path, "--data", str(epochs["gpt"]), "--dtype", "float64", "--rates", rates)
    assert worst(found[0], wanted.losses) < 1e-9
    assert worst(found[1], wanted.norms) < 1e-9
    assert found[2] == pytest.approx(wanted.held_out, rel=1e-9)


def pairs() -> Iterator[Any]:
    """The layouts on two ranks, or on the most that there can be.

    Gradients that are sent after the backward pass, which is all that is compiled, have one kind for all. So have
    schedules: 1F1B, and the one with several stages of a rank and two backward passes; the others call them in another
    order.
    """
    alike = {
        "allreduce_resnet": {"parameter", "ring", "tree", "rank0"},
        "pipeline_gpt": {"GPipe", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"},
    }
    for layout in (layout for recipe in runner.SUPERVISED for layout in runner.layouts(recipe)):
        first = runner.layout(layout.recipe, 2)
        if alike.get(layout.recipe, set()) & {*layout.flags}:
            continue
        if layout.size == first.size and layout.dp_size == first.dp_size:
            yield pytest.param(layout, id=str(layout))


@pytest.mark.parametrize("layout", list(pairs()))
def test_compiled(layout: runner.Layout, once: Once, epochs: dict[str, Path], tmp_path: Path) -> None:
    """With --compile: traced, forward and backward, but not translated to C++, which would take half a minute each."""
    folder = epochs[runner.workload(layout.recipe)]
    wanted = plain_curve(once, layout.recipe, "float64", folder, *([layout.sizes] if layout.sizes else []))
    flags = ("--data", str(folder), "--dtype", "float64", "--stop-after", "3", "--compile")
    found = curves(layout, tmp_path, *flags, target=runner.run_traced)
    assert worst(found[0], wanted.losses, steps=3) < 1e-9
    assert worst(found[1], wanted.norms, steps=3) < 1e-9


RECOMPUTING = [name for name in runner.RECIPES if runner.has_flag(name, "--recompute")]


@pytest.mark.parametrize(("recipe", "what"), [*((name, "selective") for name in RECOMPUTING), ("fsdp_gpt", "full")])
def test_compiled_and_computed_again(
    recipe: str, what: str, once: Once, epochs: dict[str, Path], tmp_path: Path
) -> None:
    """The compiler decides itself what to compute again, by the same choice of what to keep."""
    layout = runner.layout(recipe, 2)
    wanted = plain_curve(once, recipe, "float64", epochs["gpt"], *([layout.sizes] if layout.sizes else []))
    flags = ("--data", str(epochs["gpt"]), "--dtype", "float64", "--stop-after", "3", "--compile")
    found = curves(layout, tmp_path, *flags, "--recompute", what, target=runner.run_traced)
    assert worst(found[0], wanted.losses, steps=3) < 1e-9
    assert worst(found[1], wanted.norms, steps=3) < 1e-9


@pytest.mark.parametrize("recipe", each_recipe([name for name in runner.RECIPES if runner.workload(name) == "resnet"]))
def test_default_model(recipe: str, once: Once, epochs: dict[str, Path], tmp_path: Path) -> None:
    """The tests above train a small network; here is the one that people get, for a few steps."""
    losses, norms, _ = plain_curve(once, recipe, "float32", epochs["resnet"], "resnet18", 4)
    flags = ("--data", str(epochs["resnet"]), "--dtype", "float32", "--model", "resnet18", "--stop-after", "4")
    found = curves(runner.layout(recipe, 2), tmp_path, *flags)
    assert worst(found[0], losses, steps=4) < 1e-4
    assert worst(found[1], norms, steps=4) < 1e-2  # its roundings grow through 18 layers; the mutants are far beyond


NEVER_SENDS = {"forward_backward": {"contextlib.nullcontext() if batch.last else model.no_sync()": "model.no_sync()"}}
OWN_MEAN = {"forward_backward": {"scale / batch.step_samples": "1 / batch.step_samples"}}
GOES_ROUND = "exchange(P2POp(dist.irecv, next_one, before, group), P2POp(dist.isend, complete, after, group))"
# Recipe, ranks, flags, and the defect.
MUTANTS: dict[str, tuple[str, int, tuple[str, ...], mutants.Changes]] = {
    "gradients are never reduced": ("ddp_resnet", 2, (), NEVER_SENDS),
    "the mean is taken over the rank's own samples": ("ddp_resnet", 2, (), OWN_MEAN),
    "the ring leaves out a hop": (
        *("allreduce_resnet", 3, ("--sync", "ring")),
        {"ring": {GOES_ROUND: f"if hop: {GOES_ROUND}"}},
    ),
    "the ring adds to the wrong chunk": (
        *("allreduce_resnet", 2, ("--sync", "ring")),
        {"ring": {"mine += received": "summed += received"}},
    ),
    "the tree leaves out the ranks beyond a power of two": (
        *("allreduce_resnet", 3, ("--sync", "tree")),
        {"tree": {"flat += receive(flat, helper, group)": "receive(flat, helper, group)"}},
    ),
    "the sums of the buckets are never read": (
        *("allreduce_resnet", 2, ("--sync", "bucket")),
        {"sync_gradients": {"model.receive_buckets()": "None"}},
    ),
    "a mean of the ranks' means": (
        *("allreduce_resnet", 2, ("--sync", "rank0")),
        {"forward_backward": {"scale / batch.step_samples": "scale / batch.inputs.shape[0] / model.group.size()"}},
    ),
    "every rank reads the samples of the first": (
        *("ddp_resnet", 2, ()),
        {"dp_coordinates": {'mesh.get_local_rank("dp")': "0"}},
    ),
    "BatchNorm sees the rank's own samples": (
        "ddp_resnet",
        2,
        (),
        {"parallelize": {"sync_batchnorm.convert(model, mesh.get_group('dp'))": "model"}},
    ),
    "accumulated micro-batches are divided by their number again": (
        *("fsdp_gpt", 2, ()),
        {"forward_backward": {"scale / batch.step_samples": "scale / batch.step_samples / 2"}},
    ),
    "the groups of HSDP train apart": (
        *("fsdp_gpt", 4, ("--dp-replicate", "2")),
        {"parallelize": {'mesh["dp_replicate", "dp_shard"]': 'mesh["dp_shard"]'}},
    ),
    "Accelerate divides by its own number of micro-batches as well": (
        *("accelerate_gpt", 2, ()),
        {"forward_backward": {"scale / batch.step_samples": "scale / batch.step_samples / 2"}},
    ),
    "each process's mean counts once": ("accelerate_gpt", 2, (), OWN_MEAN),
    "Accelerate sends no gradient": (
        *("accelerate_gpt", 2, ()),
        {
            "forward_backward": {
                "contextlib.nullcontext() if batch.last else model.accelerator.no_sync(model)": (
                    "model.accelerator.no_sync(model)"
                )
            }
        },
    ),
    "ranks that share the matrices read different samples": (
        *("tensor_gpt", 2, ("--tp", "2")),
        {"dp_coordinates": "def dp_coordinates(mesh): return mesh.get_rank(), mesh.size()"},
    ),
    "pieces come back out of order": (
        *("context_gpt", 2, ("--cp", "2", "--cp-kind", "ulysses")),
        {"ulysses_attention": {"reversed(pieces[1::2])": "pieces[1::2]"}},
    ),
    "positions do not follow the pieces": (
        *("context_gpt", 2, ("--cp", "2", "--cp-kind", "ring")),
        {"share_sequences": {"mine(torch.arange(tokens.shape[-1], device=tokens.device), dim=0)": "None"}},
    ),
    "two neighbouring pieces a rank, under the mask for balanced ones": (
        *("context_gpt", 2, ("--cp", "2", "--cp-kind", "allgather")),
        {"pieces_of": {"[pieces[rank], pieces[2 * size - 1 - rank]]": "[pieces[2 * rank], pieces[2 * rank + 1]]"}},
    ),
    "late queries do not read the pieces of a later rank": (
        *("context_gpt", 2, ("--cp", "2", "--cp-kind", "ring")),
        {"visible": {"(every, early, False) if owner < rank else (late, every, False)": "(every, early, False)"}},
    ),
    "the softmax is not corrected when another block is joined": (
        *("context_gpt", 2, ("--cp", "2", "--cp-kind", "ring")),
        {"BlockAttention": {"(logs[:, :, rows] - both).exp()[..., None]": "1.0"}},
    ),
    "a block's gradient does not follow it": (
        *("context_gpt", 4, ("--cp", "4", "--cp-kind", "ring")),
        {"sum_round": {"part + wait() if wait else part": "part + 0 * wait() if wait else part"}},
    ),
    "pipelines train apart": (
        *("pipeline_gpt", 2, ("--pp", "1")),
        {"forward_backward": {"dist.all_reduce(total, group=model.process_group)": "pass"}},
    ),
    "each stage clips by its own norm": (
        *("pipeline_gpt", 2, ("--pp", "2")),
        {"clip_gradients": {"dist.all_reduce(square)": "pass"}},
    ),
    "the two gradients of a tied embedding are not summed": (
        *("pipeline_gpt", 2, ("--pp", "2", "--tied")),
        {"forward_backward": {"if model.tied_group: ...": "if False: ..."}},
    ),
    "a tied embedding counts twice in the norm": (
        *("pipeline_gpt", 2, ("--pp", "2", "--tied")),
        {"clip_gradients": {"[p.grad for p in trained(model) if p is not copied]": "[p.grad for p in trained(model)]"}},
    ),
    "an evaluation leaves its gradients": (
        *("pipeline_gpt", 2, ("--pp", "2", "--schedule", "ZBVZeroBubble", "--num-layers", "5", "--eval-every", "2")),
        {"forward_only": {"model.zero_grad(set_to_none=True)": "pass"}},
    ),
}


def test_mutants_can_be_made(tmp_path: Path) -> None:
    """Most of them are planted in `-m rest` only: a line that has been rewritten must not wait until then."""
    for number, (recipe, _, _, defect) in enumerate(MUTANTS.values()):
        mutants.mutate(recipe, tmp_path / str(number), defect)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(mutant: str, once: Once, epochs: dict[str, Path], tmp_path: Path) -> None:
    """The proof above can fail: each of these defects is far outside the looser tolerance.

    A new model hardly attends to anything, so a defect of attention is seen in float64.
    """
    recipe, size, how, defect = MUTANTS[mutant]
    dtype, least = ("float64", 1e-6) if "--cp" in how else ("float32", 1e-3)
    folder = epochs[runner.workload(recipe)]
    values = dict(itertools.pairwise(how))
    layout = runner.Layout(recipe, size, how, size // int(values.get("--pp", 1)) if "--pp" in how else size)
    sizes = (("num_layers", int(values["--num-layers"])),) if "--num-layers" in how else ()
    wanted = plain_curve(once, recipe, dtype, folder, *([sizes, "--tied" in how] if sizes or "--tied" in how else []))
    flags = ("--data", str(folder), "--dtype", dtype, "--stop-after", "4", "--check-every", "0")
    found = curves(layout, tmp_path, *flags, mutant=mutants.mutate(recipe, tmp_path, defect))
    # Clipping hides a gradient that is only scaled from the losses, not from its norm.
    assert max(worst(found[0], wanted.losses, steps=4), worst(found[1], wanted.norms, steps=4)) > least
