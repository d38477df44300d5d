"""Every example of the pages trains: like its script, on any number of ranks, and resumed to the bit."""

import ast
import copy
import functools
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import seed
from common.run import cli
from common.train import data, initial, sampler, schedule
from common.workloads import gpt, kept
from PIL import Image
from safetensors.torch import load_file

from tests.harness import runner, short_resnet  # noqa: F401 (adds the small model)
from tests.harness.states import same_tensors
from tests.recipes.test_moe import How, PlainMoe

EXAMPLE = re.compile(r"<!-- example (.+?) -->\n```python\n(.*?)```", re.DOTALL)
WAS = re.compile(r"^(.*?) +# was: (.+)\n$")
EXAMPLES = [
    one for page in ("porting.md", "examples.md") for one in EXAMPLE.findall((runner.ROOT / "docs" / page).read_text())
]
PORTS = list(
    dict.fromkeys(
        (name, recipe)
        for name, _, recipes in (title.partition(": ") for title, _ in EXAMPLES)
        for recipe in recipes.split()
    )
)
# The others are slow.
IN_DEFAULT_RUN = {("stream", "ddp_resnet"), ("llama", "fsdp_gpt"), ("muon", "fsdp_gpt"), ("average", "ddp_resnet")}
ROUNDS = {("muon", "fsdp_gpt"): 1e-5}  # Muon multiplies matrices in bfloat16, and FSDP's ranks multiply parts
BUILDS_ON = {"stream": "curves"}  # examples that change another one
IMAGES = ("--global-batch-size", "8", "--lr", "0.01", "--sync-bn")
TEXT = ("--global-batch-size", "8", *runner.SMALL["gpt"])
FLAGS = {
    "curves": ("--global-batch-size", "32", "--lr", "3e-3", "--lr-reference-batch", "32", "--warmup-steps", "0"),
    "stream": ("--global-batch-size", "32", "--lr", "3e-3", "--lr-reference-batch", "32", "--warmup-steps", "0"),
    "vit": ("--global-batch-size", "8", "--lr", "0.01"),
    "segmentation": IMAGES,
    "timm": IMAGES,
    "bert": ("--global-batch-size", "8"),
    "lora": TEXT,
    "gan": ("--global-batch-size", "8", "--lr", "1e-3"),
    "contrastive": ("--global-batch-size", "8", "--lr", "1e-3"),
    "detection": ("--global-batch-size", "8", "--lr", "0.01"),
    "llama": (*TEXT, "--tied"),
    "optimizer": TEXT,
    "derivatives": ("--global-batch-size", "8", "--lr", "1e-3"),
    "teacher": IMAGES,
    "plateau": IMAGES,
    "muon": TEXT,
    "dpo": TEXT,
    "experts": (*TEXT, "--micro-batch-size", "2", "--num-layers", "4"),
    "average": (),
}


def flags_for(name: str, recipe: str) -> list[str]:
    small = runner.small(recipe) if name == "average" else ()
    return [
        *FLAGS[name],
        *small,
        *(("--sync-bn",) if name == "average" and runner.has_flag(recipe, "--sync-bn") else ()),
    ]


def port(name: str, recipe: str, folder: Path) -> Path:
    """Do to a copy of a recipe what the page says; returns its train.py."""
    text = runner.source(recipe)
    names = [one for one in (BUILDS_ON.get(name), name) if one]
    if "curves" in names:
        text = insert(text, script().partition("def main()")[0])
    for one in names:
        for title, block in EXAMPLES:
            mine, _, recipes = title.partition(": ")
            if mine == one and recipe in recipes.split():
                text = insert(text, block)
    path = folder / recipe / "train.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def insert(text: str, block: str) -> str:
    """Insert a block of the page into a train.py.

    Indented lines up to one that ends in "# was: ..." take the place of that one. A function takes the place of its
    namesake, and anything else comes before section 2.
    """
    lines = block.splitlines(keepends=True)
    if any(map(WAS.match, lines)):
        taken: list[str] = []
        for line in lines:
            if not line.startswith(" "):
                continue
            found = WAS.match(line)
            taken.append(f"{found[1]}\n" if found else line)
            if found:
                (old,) = (one for one in text.splitlines(keepends=True) if found[2] in one)
                assert depth(old) == depth(taken[0]) == depth(taken[-1]), old
                text = text.replace(old, "".join(taken))
                taken = []
        assert not taken, "the last line says what it replaces"
        block = "".join(line for line in lines if not line.startswith(" "))
    added = ""
    for node in ast.parse(block).body:
        there = [one for one in ast.parse(text).body if getattr(one, "name", "") == getattr(node, "name", None)]
        if there:
            text = text.replace(ast.get_source_segment(text, there[0]) or "", ast.get_source_segment(block, node) or "")
        else:
            decorated = getattr(node, "decorator_list", [])
            begin = decorated[0].lineno if decorated else node.lineno
            added += "\n".join(block.splitlines()[begin - 1 : node.end_lineno]) + "\n\n\n"
    return text.replace("# --- 2 Workload", f"{added}# --- 2 Workload", 1)


def depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def script() -> str:
    return dict(EXAMPLES)["script"]


class Order:
    """The order of the samples in a recipe, epoch after epoch."""

    def __init__(self) -> None:
        self.epoch = -1

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(sampler.permutation(960, 0, self.epoch).tolist())

    def __len__(self) -> int:
        return 960


def losses_of_script() -> list[float]:
    """What the script prints, in float64, with a recipe's initial weights and order of samples."""
    text = script()
    for old, new in {
        "torch.manual_seed(0)": "seed.everything(0, seed.INIT)",
        "shuffle=True": "sampler=Order()",
        "FillGaps().to(device)": "FillGaps().double()",
        "tensor.to(device)": "tensor.double() if tensor.is_floating_point() else tensor",
    }.items():
        assert old in text
        text = text.replace(old, new)
    printed: list[float] = []
    names: dict[str, Any] = {"__name__": "__main__", "print": printed.append, "Order": Order, "seed": seed}
    exec(compile(text, "script", "exec"), names)
    return printed


def train(path: Path, size: int, run: Path, *flags: str) -> None:
    where = ["--out", str(run.parent), "--name", run.name, "--log-every", "1"]
    if "--pp" not in flags and path.parent.name == "pipeline_gpt":
        where += runner.layout("pipeline_gpt", size).strategy
    result = runner.run_recipe(path, size, *where, *flags)
    assert result.ok, str(result)


@pytest.mark.parametrize("recipe", [recipe for name, recipe in PORTS if name == "curves"])
def test_same_as_the_script(recipe: str, tmp_path: Path) -> None:
    with kept.generators():
        losses = np.array(losses_of_script()).reshape(2, 33)
    path = port("curves", recipe, tmp_path)
    for size in (1, 2):
        run = tmp_path / str(size)
        train(path, size, run, *FLAGS["curves"], "--max-steps", "60", "--eval-every", "30", "--dtype", "float64")
        assert [*runner.records(run, "train/loss").values()] == pytest.approx(losses[:, :30].ravel(), rel=1e-9)
        assert [*runner.records(run, "val/loss").values()] == pytest.approx(losses[:, 30:].mean(1), rel=1e-9)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures in colour, of two classes."""
    folder = tmp_path_factory.mktemp("photos")
    pixels = np.random.default_rng(0).integers(0, 256, (30, 32, 32, 3), dtype=np.uint8)
    for i, one in enumerate(pixels):
        place = folder / ("train" if i < 24 else "val") / ("cat" if i % 2 else "dog")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(one).save(place / f"{i}.png")
    return folder


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers for it
@pytest.mark.parametrize(
    ("name", "recipe"), [pytest.param(*one, marks=[pytest.mark.rest] * (one not in IN_DEFAULT_RUN)) for one in PORTS]
)
def test_port(name: str, recipe: str, photos: Path, small_text: Path, tmp_path: Path) -> None:
    """On 2 ranks it resumes to the bit; in float64, on 1 it is the same."""
    path = port(name, recipe, tmp_path)
    flags = ["--max-steps", "6", "--save-every", "3", "--eval-every", "3", *flags_for(name, recipe)]
    flags += ["--data", str(photos)] if name in ("vit", "timm") else []
    flags += ["--data", str(small_text)] if runner.has_flag(recipe, "--tokenizer") else []
    train(path, 2, tmp_path / "whole", *flags, "--dtype", "float32")
    for stop in ("3", "0"):
        train(path, 2, tmp_path / "parts", *flags, "--dtype", "float32", "--stop-after", stop)
    last = "checkpoints/step_00000006"
    assert same_tensors(tmp_path / "whole" / last, tmp_path / "parts" / last)
    for size in (1, 2):
        train(path, size, tmp_path / str(size), *flags, "--dtype", "float64")
    wanted = losses_of_plain_loop(path, [*flags, "--dtype", "float64"])
    for size in (1, 2):
        found = runner.records(tmp_path / str(size), "train/loss")
        assert [*found.values()] == pytest.approx(wanted, rel=ROUNDS.get((name, recipe), 1e-9)), size
    assert wanted[5] != wanted[0]


def losses_of_plain_loop(path: Path, flags: list[str]) -> list[float]:
    """Losses of a loop in one process around section 2 of a port, in float64: nothing else of the recipe."""
    port = runpy.run_path(str(path))
    args = cli.parse(port["Args"], flags)
    with kept.generators():
        train, _ = port["make_data"](args)
        model = initial.materialize(port["make_model"](args, train), args.seed, torch.device("cpu"), torch.float64)
        optimizer = port["make_optimizer"](args, model)
        rates = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            functools.partial(schedule.warmup_cosine, warmup_steps=args.warmup_steps, max_steps=args.max_steps),
        )
        losses = []
        for step in range(args.max_steps):
            indices = step * args.global_batch_size + np.arange(args.global_batch_size)
            epoch = 0
            if len(train):  # no stream
                epoch, first = divmod(indices[0], len(train))
                indices = sampler.permutation(len(train), args.seed, epoch)[first : first + args.global_batch_size]
            batch = data.Batch(*train.read(np.full_like(indices, epoch), indices), args.global_batch_size, True)
            sums = port["forward"](args, model, batch)
            loss = sums["loss"] / sums.get("weight", sums["count"])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm or float("inf"))
            optimizer.step()
            rates.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.rest
def test_preferences_as_by_hand(tmp_path: Path) -> None:
    """The loss of DPO, by its formula over single answers: at the start ln 2, and after steps that have moved it."""
    path = port("dpo", "ddp_gpt", tmp_path)
    flags = [*FLAGS["dpo"], "--dtype", "float64", "--max-steps", "4", "--save-every", "4"]
    train(path, 2, tmp_path / "run", *flags)
    losses = runner.records(tmp_path / "run", "train/loss")
    assert losses[1] == pytest.approx(np.log(2), rel=1e-12)
    files = (tmp_path / "run" / "checkpoints" / "step_00000004").glob("*.safetensors")
    weights = {name: one for file in files for name, one in load_file(file).items()}
    found = runpy.run_path(str(path))
    args = cli.parse(found["Args"], flags)
    _, held_out = found["make_data"](args)
    models = [initial.materialize(found["make_model"](args, held_out), 0, torch.device("cpu"), torch.float64)]
    models += [copy.deepcopy(models[0])]
    models[1].load_state_dict({name: weights[name] for name in models[1].state_dict()})
    total = 0.0
    for i in range(len(held_out)):
        tokens, targets = held_out.dataset[i]
        moved = []
        for row, wanted in zip(tokens, targets, strict=True):
            first, now = (model(row[None])[0].log_softmax(1) for model in models)
            places = [(t, int(wanted[t])) for t in range(len(row)) if wanted[t] >= 0]
            moved.append(sum((now[place] - first[place]).item() for place in places))
        total += np.log1p(np.exp(-0.1 * (moved[0] - moved[1])))
    assert runner.records(tmp_path / "run", "val/loss")[4] == pytest.approx(total / len(held_out), rel=1e-9)
    assert abs(total / len(held_out) - np.log(2)) > 1e-3


class BalancedLoop(PlainMoe):
    """A plain loop over all experts, and the balance loss of each sequence."""

    def sequences(self) -> torch.Tensor:
        length = self.counts.sum(1, keepdim=True) / self.how.top_k
        return self.how.experts * (self.counts / self.counts.sum(1, keepdim=True) * self.probabilities / length).sum(1)


@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        (2, ("--pp", "2", "--schedule", "1F1B")),
        pytest.param(1, ("--pp", "1", "--schedule", "GPipe"), marks=pytest.mark.rest),
        pytest.param(4, ("--pp", "2", "--schedule", "GPipe"), marks=pytest.mark.rest),
        pytest.param(2, ("--pp", "2", "--schedule", "Interleaved1F1B"), marks=pytest.mark.rest),
    ],
)
def test_experts_in_a_pipeline(size: int, strategy: tuple[str, ...], small_text: Path, tmp_path: Path) -> None:
    """Losses and gradient norms of a plain loop in one process, whose loss has the balance of each sequence."""
    path = port("experts", "pipeline_gpt", tmp_path)
    path.write_text(path.read_text().replace("BALANCE = 0.01 ", "BALANCE = 0.5 "))  # so that a fault shows
    flags = [*FLAGS["experts"], "--data", str(small_text), "--max-steps", "5", "--dtype", "float64"]
    train(path, size, tmp_path / "run", *flags, "--eval-every", "9", *strategy)
    found = runpy.run_path(str(path))
    args = cli.parse(found["Args"], flags)
    split, _ = found["make_data"](args)
    how = How(experts=4, top_k=2)
    with torch.device("meta"):
        model = gpt.GPT(gpt.Shape.of(args, split.vocab_size))
        for block in model.blocks.values():
            block.mlp = BalancedLoop(model.shape, how)
    initial.materialize(model, args.seed, torch.device("cpu"), torch.float64)
    optimizer = found["make_optimizer"](args, model)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, functools.partial(schedule.warmup_cosine, warmup_steps=args.warmup_steps, max_steps=args.max_steps)
    )
    losses, norms, balances = [], [], []
    for step in range(args.max_steps):
        indices = sampler.permutation(len(split), args.seed, 0)[step * 8 : (step + 1) * 8]
        tokens, targets = split.read(np.zeros_like(indices), indices)
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        balance = torch.stack([block.mlp.sequences().mean() for block in model.blocks.values()]).mean()
        (loss + 0.5 * balance).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm).item())
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        balances.append(balance.item())
    assert [*runner.records(tmp_path / "run", "train/loss").values()] == pytest.approx(losses, rel=1e-9)
    assert [*runner.records(tmp_path / "run", "train/grad_norm").values()] == pytest.approx(norms, rel=1e-9)
    assert max(balances) > 1.001, "the experts are not used alike"


def test_plateau_is_that_of_torch(small_digits: Path, tmp_path: Path) -> None:
    """Over a stop between two evaluations, and at a rate at which one is often worse than the best one."""
    path = port("plateau", "ddp_resnet", tmp_path)
    flags = ["--data", str(small_digits), "--model", "resnet6", "--global-batch-size", "64", "--lr", "6"]
    flags += ["--max-steps", "48", "--eval-every", "2", "--warmup-steps", "0", "--dtype", "float64"]
    for stop in ("11", "0"):
        train(path, 2, tmp_path / "run", *flags, "--stop-after", stop)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    factors = [1.0, 1.0]
    for step, loss in runner.records(tmp_path / "run", "val/loss").items():
        if step % 2 == 0:
            scheduler.step(loss)
            factors += 2 * [optimizer.param_groups[0]["lr"]]
    found = [*runner.records(tmp_path / "run", "train/lr").values()]
    cosine = [schedule.warmup_cosine(step, 0, 48) for step in range(48)]
    assert found == pytest.approx([found[0] * one * other for one, other in zip(factors, cosine, strict=False)])
    assert min(factors) < 0.5


def test_saved_as_its_library_does(small_text: Path, tmp_path: Path) -> None:
    """save_pretrained before the process group ends writes what the last checkpoint holds."""
    import transformers

    path = port("llama", "ddp_gpt", tmp_path)
    folder = tmp_path / "pretrained"
    save = f"    if world.rank == 0:\n        model.module.save_pretrained({str(folder)!r})\n    run.finish()\n"
    text = path.read_text()
    assert text.count("    run.finish()\n") == 1
    path.write_text(text.replace("    run.finish()\n", save))
    train(path, 2, tmp_path / "run", *FLAGS["llama"], "--data", str(small_text), "--max-steps", "2")
    files = (tmp_path / "run" / "checkpoints" / "step_00000002").glob("*.safetensors")
    saved = {name: one for file in files for name, one in load_file(file).items()}
    weights = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    common = saved.keys() & weights.keys()
    assert len(common) > 10
    assert all(torch.equal(saved[name], weights[name]) for name in common)


def test_average_begins_with_other_weights(small_digits: Path, tmp_path: Path) -> None:
    """Of --init, and not with those that it replaces: without a rate, the average stays what the weights are."""
    path = port("average", "ddp_resnet", tmp_path)
    flags = [*flags_for("average", "ddp_resnet"), "--data", str(small_digits), "--max-steps", "1"]
    train(path, 1, tmp_path / "first", *flags)
    train(path, 2, tmp_path / "second", *flags, "--lr", "0", "--init", str(tmp_path / "first"))
    files = (tmp_path / "second" / "checkpoints" / "step_00000001").glob("*.safetensors")
    saved = {name: one for file in files for name, one in load_file(file).items()}
    averages = {name: one for name, one in saved.items() if name.startswith("extra.average.")}
    assert averages
    for name, one in averages.items():
        torch.testing.assert_close(one, saved[name.removeprefix("extra.average.")], rtol=1e-6, atol=1e-7)


def test_mutant_that_returns_a_mean(tmp_path: Path) -> None:
    path = port("curves", "ddp_resnet", tmp_path)
    path.write_text(path.read_text().replace("errors.sum()", "errors.mean()"))
    result = runner.run_recipe(path, 2, "--out", str(tmp_path), *FLAGS["curves"])
    assert not result.ok
    assert "error: forward returns a mean loss" in str(result)
    assert "Traceback" not in str(result)


def test_model_that_counts_its_forward_passes_resumes_exactly(tmp_path: Path) -> None:
    """The looks of the start are forward passes as well: they do not count."""
    path = port("curves", "ddp_resnet", tmp_path)
    text = path.read_text().replace("        super().__init__()\n", COUNTS, 1)
    path.write_text(
        text.replace("        return self.layers(", "        self.calls += 1\n        return self.layers(", 1)
    )
    flags = [*FLAGS["curves"], "--max-steps", "4", "--save-every", "2", "--eval-every", "4", "--dtype", "float32"]
    train(path, 2, tmp_path / "whole", *flags)
    for stop in ("2", "0"):
        train(path, 2, tmp_path / "parts", *flags, "--stop-after", stop)
    assert calls_in(tmp_path / "whole", 2) == 2
    evaluation = 3  # passes of one; a stop makes none
    assert calls_in(tmp_path / "whole", 4) == calls_in(tmp_path / "parts", 4) == 4 + evaluation


COUNTS = """        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
"""


def calls_in(run: Path, step: int) -> int:
    files = (run / "checkpoints" / f"step_{step:08d}").glob("*.safetensors")
    return next(int(found["calls"]) for found in map(load_file, files) if "calls" in found)
