"""tools.judge --port: the nearest recipe, and the functions and flags that take the parts of a script."""

import json
import os
import re
from pathlib import Path

import pytest
from tools.judge import launch, port, port_seen, port_table

from tests.harness import runner, shapes, twins
from tools import about

# By hand: which recipe a reader would begin with.
NEAREST = dict.fromkeys(shapes.ALL, "ddp_resnet") | {
    "nanoGPT": "ddp_gpt",
    "nanoGPT with no_sync": "ddp_gpt",
    "nanoGPT in bfloat16": "ddp_gpt",
    "lambda": "ddp_gpt",
    "lambda with fully_shard": "fsdp_gpt",
    "fsdp1": "fsdp_gpt",
    "fsdp2": "fsdp_gpt",
    "zero": "fsdp_gpt",
    "accelerate": "accelerate_gpt",
    "cleanrl": "syncbn_ppo",
    "cleanrl with an all-reduce per parameter": "syncbn_ppo",
    "picotron": "allreduce_resnet",
    "tensor parallel": "tensor_gpt",
    "local sgd": "diloco_gpt",
    "module": "multinode_resnet",
}
# What names alone do not tell: how often something is sent, and whether a flag is on.
ONLY_RUNS_TELL = {"local sgd": "allreduce_resnet", "module without accumulation": "multinode_resnet"}
TWINS_ONLY_RUNS_TELL = {"context_gpt": "fsdp_gpt", "diloco_gpt": "allreduce_resnet"}
NAMED = [one for one in about.RECIPES if any(one.startswith(f"{rule.strategy}_") for rule in port_table.STRATEGIES)]


def said(path: Path) -> dict[str, str]:
    """The names in a script."""
    return port.names(port.sources(path))


def test_strategies_are_those_of_the_recipes() -> None:
    """Each strategy has a recipe; of the recipes, only one trains nothing."""
    assert {rule.strategy for rule in port_table.STRATEGIES} == {one.rpartition("_")[0] for one in NAMED}
    assert {*about.RECIPES} - {*NAMED} == {"cellfree_mimo"}


@pytest.mark.parametrize("recipe", NAMED)
def test_each_part_has_a_place(recipe: str) -> None:
    """A function that is renamed, or a flag that goes, is missed here."""
    assert "Args" in port.sections(recipe)
    missing = [one.what for one in port_table.PLACES if one.into and not port.target(recipe, one.into)]
    assert not missing


def test_each_name_is_one_of_the_recipes() -> None:
    """No alternative and no flag that no recipe has."""
    wanted = {name for one in port_table.PLACES for name in one.into} | {name for _, name in port_table.FLAGS}
    assert not [name for name in sorted(wanted) if not any(port.target(one, (name,)) for one in NAMED)]
    banners = {one: set(re.findall(r"^# --- (\d)", about.source(one), re.MULTILINE)) for one in NAMED}
    assert all({str(number) for number in port.sections(one).values()} <= found for one, found in banners.items())


def test_nearest_by_names(tmp_path: Path) -> None:
    """As for a script that does not come to a step: all shapes, and the recipes' own twins."""
    found = {}
    for name, text in shapes.ALL.items():
        (tmp_path / "train.py").write_text(text)
        found[name] = port.nearest({}, said(tmp_path / "train.py"))[0]
    assert found == NEAREST | ONLY_RUNS_TELL
    found = {name: port.nearest({}, said(about.ROOT / "recipes" / name / "bare.py"))[0] for name in twins.TWINS}
    assert found == {name: name for name in twins.TWINS} | TWINS_ONLY_RUNS_TELL


def step(*sends: str) -> list[launch.Event]:
    """A step, and the collectives before it: of gradients, of weights or of other numbers."""
    fields = {"e": "collective", "name": "all_reduce", "direct": True, "at": "t.py:1"}
    sent = [fields | {"grads": int(one == "grads"), "weights": one == "weights"} for one in sends]
    return [*sent, {"e": "step", "id": 0, "at": "t.py:2"}]


@pytest.mark.parametrize(
    ("steps", "trait"),
    [
        ([step("grads", "loss")] * 4, "gradients by hand"),
        ([step("weights"), *[step("grads")] * 3], "gradients by hand"),
        ([step("weights"), step(), step("weights"), step(), step()], "weights now and then"),
        ([step("weights"), step("loss"), step("loss")], ""),
    ],
)
def test_what_is_sent_and_how_often(steps: list[list[launch.Event]], trait: str) -> None:
    """Before the first step, ranks may send their first weights."""
    events = [event for one in steps for event in one]
    found = port_seen.traits(launch.Run([events], ["end"]))
    assert {*found} == {trait, "steps"} - {""}


TABLE = {
    "make_data (section 2)": ("TensorDataset(torch", "train, val = make_data("),
    "evaluate (section 4)": ("def validate",),
    "make_model (section 2)": ("model = nn.Sequential(",),
    "parallelize (section 3)": ("model = DDP(",),
    "make_optimizer (section 2)": ("optimizer = torch.optim.SGD(",),
    "lr_factor (section 2)": ("StepLR(",),
    "forward_backward (section 3)": ("loss.backward()",),
    "forward (section 2)": (
        "criterion = nn.CrossEntropyLoss()",
        "loss = criterion(model(",
        "dist.all_reduce(total",
        "        losses.all_reduce(device)",
    ),
    "train_step (section 4)": ("optimizer.zero_grad()", "optimizer.step()"),
    "--resume": ("checkpoint = torch.load(", '"--resume"'),
    "--epochs": ('"--epochs"',),
    "--lr": ('"--lr"',),
}


def test_table_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of PyTorch's imagenet example stands at the function that takes it, and only there."""
    monkeypatch.chdir(tmp_path)
    text = shapes.ALL["pytorch imagenet"]
    Path("train.py").write_text(text)
    found = port.port(Path("train.py"), {"DDP": "train.py:63", "steps": "train.py:88"})
    assert (found.recipe, found.reason) == ("ddp_resnet", "DistributedDataParallel at train.py:63; no tokens are read")
    lines = text.splitlines()
    for into, parts in TABLE.items():
        own = {int(i) for one in found.rows if one.into == into for i in re.findall(r"[:,] ?(\d+)", one.lines)}
        assert own == {1 + next(i for i, one in enumerate(lines) if part in one) for part in parts}, into
    batch = next(one for one in found.rows if one.what == "--batch-size")
    assert batch.into == "--global-batch-size"


def test_modules_beside_the_script_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that a script imports, and a flag that no recipe has; a file that is no program is left out."""
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text("from torch import nn\nimport broken\nclass Net(nn.Module):\n    pass\n")
    Path("broken.py").write_text("def (\n")
    Path("train.py").write_text("import nets\nmodel = nets.Net()\nparser.add_argument('--spin', type=float)\n")
    rows = {(one.into, one.what): one.lines for one in port.port(Path("train.py"), {}).rows}
    assert rows == {
        ("make_model (section 2)", "the model"): "train.py:2; nets.py:3-4",
        ("Args (section 1)", "--spin"): "train.py:3",
    }


def judge(folder: str, names: list[str]) -> None:
    """Judge scripts, and print the recipe that is nearest to each."""
    from tools.judge import report, verdict

    for name in names:
        os.chdir(folder)
        script = Path(name)
        found = verdict.judge(verdict.Asked(script, timeout_s=runner.HANG_S, gpu="bare" not in name, once=True))
        print("port: " + json.dumps(json.loads(report.as_json(found, port.port(script, found.traits)))["port"]))


def recipes_of(folder: Path, names: list[str]) -> list[str]:
    """The nearest recipe of each script."""
    result = runner.spawn(judge, [(str(folder), names)], timeout_s=3 * runner.HANG_S)
    assert result.ok, str(result)
    return [json.loads(one)["recipe"] for one in re.findall(r"^port: (.*)", result.outputs[0], re.MULTILINE)]


@pytest.mark.rest
@pytest.mark.parametrize("first", range(0, len(shapes.ALL), 10))
def test_nearest_of_runs(first: int, tmp_path: Path) -> None:
    """What a run has shown decides."""
    names = [*shapes.ALL][first : first + 10]
    for i, name in enumerate(names):
        (tmp_path / f"{i}.py").write_text(shapes.ALL[name])
    found = recipes_of(tmp_path, [f"{i}.py" for i in range(len(names))])
    assert dict(zip(names, found, strict=True)) == {name: NEAREST[name] for name in names}


@pytest.mark.rest
@pytest.mark.parametrize("recipe", twins.TWINS)
def test_twin_is_nearest_to_its_recipe(recipe: str, tmp_path: Path) -> None:
    """A bare.py of this repository, with a small model."""
    assert recipes_of(tmp_path, [twins.write_small(recipe, tmp_path).name]) == [recipe]
