"""One checkpoint serves any strategy: what one layout saves, another holds bit for bit, and trains on as if alone.

A plain `pytest` takes one training through all kinds of layouts; with `-m rest`, each layout goes on with two others';
and tests/layouts_table.py goes from each to each. The checkpoints lie in folders, or in an object store (tests/store):
there, `-m rest` makes some of the moves.
"""

import ast
import collections
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from common import keymap
from common.workloads import gpt

from tests.harness import mutants, runner, segments
from tests.harness.once import Once
from tests.harness.runner import Layout
from tests.recipes.test_equivalence import BATCH, FLAGS, RATES, Curve, plain_gpt_loop
from tests.store import server
from tests.store.server import Server

STEPS = 20  # an epoch of small_text
STOP, MORE = 3, 2  # steps until the checkpoint, and after it
TOLERANCE = 1e-9
SIZES = (("num_layers", 5),)  # of which four stages get unequal numbers

# Every way to deal out a model, each on two numbers of ranks; nn.DataParallel knows one process only.
KINDS: dict[str, tuple[Layout, ...]] = {
    "dp": (Layout("dp_gpt", 1, (), 1),),
    "ddp": (Layout("ddp_gpt", 2, (), 2), Layout("ddp_gpt", 3, (), 3)),
    "fsdp": (Layout("fsdp_gpt", 2, (), 2), Layout("fsdp_gpt", 3, (), 3)),
    "hsdp": (
        Layout("fsdp_gpt", 4, ("--dp-replicate", "2"), 4),
        Layout("fsdp_gpt", 2, ("--dp-replicate", "2"), 2),
    ),
    "tp": (Layout("tensor_gpt", 2, ("--tp", "2"), 1), Layout("tensor_gpt", 4, ("--tp", "4"), 1)),
    "tp x fsdp": (Layout("tensor_gpt", 4, ("--tp", "2"), 2), Layout("tensor_gpt", 3, ("--tp", "1"), 3)),
    "pp": (
        Layout("pipeline_gpt", 2, ("--pp", "2", "--schedule", "InterleavedZeroBubble"), 1),
        Layout("pipeline_gpt", 4, ("--pp", "4", "--schedule", "1F1B"), 1),
    ),
    "pp x dp": (
        Layout("pipeline_gpt", 4, ("--pp", "2", "--schedule", "Interleaved1F1B"), 2),
        Layout("pipeline_gpt", 2, ("--pp", "1", "--schedule", "GPipe"), 2),
    ),
    "cp": (
        Layout("context_gpt", 2, ("--cp", "2", "--cp-kind", "ring"), 1),
        Layout("context_gpt", 4, ("--cp", "2", "--cp-kind", "ulysses"), 2),
    ),
    "accelerate": (Layout("accelerate_gpt", 2, (), 2), Layout("accelerate_gpt", 3, (), 3)),
    "diloco": (Layout("diloco_gpt", 2, runner.AS_ONE, 2), Layout("diloco_gpt", 3, runner.AS_ONE, 3)),
}
LAYOUTS = [layout for kind in KINDS.values() for layout in kind]
# With a tied embedding, one of each kind: in the first pipeline one rank has both its ends, in the others two have.
TIED = [KINDS[kind][i] for kind, i in zip(KINDS, (0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0), strict=True)] + [KINDS["pp"][1]]


@pytest.fixture(scope="module")
def dp_gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe that is not there, as strategies can be exchanged: ddp_gpt with the strategy of dp_resnet."""
    strategy = ast.parse(runner.sections(runner.source("dp_resnet"))[3]).body
    changes = {node.name: ast.unparse(node) for node in strategy if isinstance(node, ast.FunctionDef)}
    changes["parallelize"] += "\n" + changes.pop("in_dtype")  # which it calls, and ddp_gpt lacks
    imports = {"import contextlib": "import contextlib; from common import UserError"}
    made = mutants.mutate("ddp_gpt", tmp_path_factory.mktemp("recipes"), changes | {"": imports})
    folder = made.parent.rename(made.parent.with_name("dp_gpt"))
    assert "nn.DataParallel(model)" in (folder / "train.py").read_text()
    return folder / "train.py"


Make = Callable[..., segments.Segment]


@pytest.fixture(scope="module")
def segment(dp_gpt: Path, small_text: Path) -> Make:
    """Makes one segment of a training: with a layout, to a folder, or to a URL with notes in a folder."""

    def make(
        layout: Layout,
        out: Path,
        *more: str,
        tied: bool = False,
        mutant: Path | None = None,
        store: Server | None = None,
        url: str = "",
    ) -> segments.Segment:
        recipe = dp_gpt if layout.recipe == "dp_gpt" else runner.ROOT / "recipes" / layout.recipe / "train.py"
        sizes = (*runner.SMALL["gpt"], "--num-layers", str(dict(SIZES)["num_layers"]), *("--tied" for _ in range(tied)))
        rate = ("--lr", str(2 * RATES["gpt"]), "--dtype", "float64")
        where = ("--data", str(small_text), "--out", url or str(out), "--name", "run")
        how = (*layout.flags, *layout.micro_batches(BATCH), *where, *more)
        return segments.Segment(mutant or recipe, layout, (*FLAGS, *sizes, *rate, *how), out / "notes", env(store))

    return make


def env(store: Server | None) -> dict[str, str]:
    """What leads a rank to a store."""
    return {**store.env, "STORE_LEASE_S": "60"} if store else {}


@pytest.fixture(scope="module")
def stored() -> Iterator[Server]:
    """A store for the checkpoints of all moves, which keeps them until the last one."""
    with server.run() as one:
        yield one


@pytest.fixture(scope="module")
def plain(small_text: Path, once: Once) -> Callable[[bool], Curve]:
    """What the plain loop leaves, whose embedding is tied or not."""
    return lambda tied: once.value(
        lambda: plain_gpt_loop(str(small_text), torch.float64, SIZES, tied), "plain loop of layouts", tied
    )


@dataclass(frozen=True)
class Source:
    """A training that one layout has begun: where, and the digests of what it held when it saved."""

    run: Path | str
    held: dict[str, set[str]]


Begin = Callable[..., Source]


@pytest.fixture(scope="module")
def begin(segment: Make, once: Once) -> Begin:
    """Begins a training with a layout, once."""

    def get(
        layout: Layout, tied: bool = False, *flags: str, mutant: Path | None = None, store: Server | None = None
    ) -> Source:
        url = f"s3://{server.BUCKET}/{layout}{'-tied' * tied}" if store else ""

        def make(out: Path) -> None:
            how = ("--stop-after", str(STOP), *flags)
            result = segments.run([segment(layout, out, *how, tied=tied, mutant=mutant, store=store, url=url)])
            assert result.ok, str(result)
            assert bool(store) != (out / "run" / "checkpoints").exists(), "it lies where it should"

        # A store is one of this process: what another process has begun lies in its own.
        name = ("mutant",) * bool(mutant) + ((store.url.rpartition(":")[2],) if store else ())
        out = once.folder(make, "begun", layout, tied, *flags, *name)
        return Source(f"{url}/run" if url else out / "run", segments.held(segment(layout, out, tied=tied).notes, "end"))

    return get


def names(tied: bool) -> set[str]:
    """What a checkpoint must hold: every tensor of the plain model, and of its optimizer."""
    with torch.device("meta"):
        shape = {"num_layers": 3, "num_heads": 4, "width": 40, "mlp_width": 44} | dict(SIZES)
        weights = list(keymap.model_tensors(gpt.GPT(gpt.Shape(256, **shape, tied=tied))))
    keys = ("step", "exp_avg", "exp_avg_sq")
    return {*weights, *(f"{keymap.OPTIMIZER}{name}.{key}" for name in weights for key in keys)}


def changed(before: dict[str, set[str]], after: dict[str, set[str]], tied: bool) -> list[str]:
    """Tensors that are not, bit for bit and on every rank that holds them, what they were on every rank."""
    every = sorted(names(tied) | before.keys() | after.keys())
    return [name for name in every if len(before.get(name, ())) != 1 or before[name] != after.get(name)]


def worst(out: Path, wanted: Curve, first: int, last: int) -> float:
    """Largest relative difference of a segment's losses and norms, steps `first` to `last`, from the plain ones."""
    found = 0.0
    for tag, values in (("train/loss", wanted.losses), ("train/grad_norm", wanted.norms)):
        curve = runner.records(out / "run", tag)
        assert list(curve) == list(range(first, last + 1)), "every step is recorded once"
        found = max(found, *(abs(curve[step] / values[step - 1] - 1) for step in curve))
    return found


def note(source: Layout, target: Layout, tied: bool, differing: int, difference: float) -> None:
    """For tests/layouts_table.py."""
    if "LAYOUTS_RECORD" in os.environ:
        row = {"source": str(source), "target": str(target), "tied": tied, "changed": differing, "worst": difference}
        with Path(os.environ["LAYOUTS_RECORD"]).open("a") as file:
            file.write(json.dumps(row) + "\n")


def sources(target: Layout, tied: bool, stored: bool = False) -> list[Layout]:
    """Whose checkpoints this one goes on with: two of other kinds, as a checkpoint has one form, whoever wrote it.

    tests/layouts_table.py wants all of them, or all with these kinds at one end.
    """
    every, at = (TIED, TIED.index(target)) if tied else (LAYOUTS, LAYOUTS.index(target))
    if "LAYOUTS_RECORD" in os.environ:
        asked = [layout for kind in os.environ["LAYOUTS_KINDS"].split(",") for layout in KINDS[kind]]
        return every if target in asked else [layout for layout in every if layout in asked]
    if stored:
        return SOME
    return [every[(at + apart) % len(every)] for apart in APART]


APART = (3, len(LAYOUTS) // 2)  # in the list of all


def test_each_layout_hands_on_and_continues() -> None:
    """To and from two, and none of its own kind."""
    kind_of = {layout: name for name, kind in KINDS.items() for layout in kind}
    moves = [(source, target) for target in LAYOUTS for source in sources(target, tied=False)]
    assert all(kind_of[source] != kind_of[target] for source, target in moves)
    assert {*collections.Counter(source for source, _ in moves).values()} == {2}


# Tied, CI has the chain of test_one_training_through_layouts, where each layout goes on with another one's checkpoint
# and hands its own on: a checkpoint has one form, whoever wrote it. tests/layouts_table.py has all moves. In a store,
# CI has those between some layouts, drawn by chance; `tests/layouts_table.py --store` has all.
SOME = random.Random(46).sample(LAYOUTS, 4)
ALL = "LAYOUTS_RECORD" in os.environ
MATRIX = [(target, False, False) for target in LAYOUTS] + [(target, True, False) for target in TIED if ALL]
if "LAYOUTS_STORE" in os.environ:
    MATRIX = [(target, tied, True) for target, tied, _ in MATRIX]
elif not ALL:
    MATRIX += [(target, False, True) for target in SOME]


@pytest.mark.rest
@pytest.mark.parametrize(
    ("target", "tied", "in_store"),
    [pytest.param(*one, id=f"{one[0]}{'-tied' * one[1]}{'-stored' * one[2]}") for one in MATRIX],
)
def test_any_to_any(
    target: Layout,
    tied: bool,
    in_store: bool,
    begin: Begin,
    segment: Make,
    plain: Callable,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """What each layout has begun goes on with this one, all in a row in the same processes."""
    store = request.getfixturevalue("stored") if in_store else None
    begun = {layout: begin(layout, tied, store=store) for layout in sources(target, tied, in_store)}
    how = ("--stop-after", str(STOP + MORE))
    rows = {
        layout: segment(target, tmp_path / str(layout), "--resume", str(one.run), *how, tied=tied, store=store)
        for layout, one in begun.items()
    }
    result = segments.run(list(rows.values()), ends=False)
    assert result.ok, str(result)
    faults = []
    for layout, one in rows.items():
        differing = changed(begun[layout].held, segments.held(one.notes, "begin"), tied)
        difference = worst(tmp_path / str(layout), plain(tied), STOP + 1, STOP + MORE)
        note(layout, target, tied, len(differing), difference)
        if differing or not difference < TOLERANCE:
            faults.append(f"{layout} -> {target}: {difference:.0e} apart, changed: {differing[:5]}")
    assert not faults, "\n".join(faults)


# One of each recipe, and in the end the first one again.
SHORT = [KINDS[kind][0] for kind in ("dp", "ddp", "fsdp", "tp", "pp", "cp", "accelerate", "diloco", "dp")]


@pytest.mark.parametrize(
    ("path", "tied"),
    [
        pytest.param(SHORT, False, id="each-recipe"),
        pytest.param([*TIED, TIED[0]], True, id="tied", marks=pytest.mark.rest),
    ],
)
def test_one_training_through_layouts(
    path: list[Layout], tied: bool, segment: Make, plain: Callable, tmp_path: Path
) -> None:
    """Handed on from layout to layout, a step or two each: each is continued, and continues another."""
    assert len(path) <= STEPS
    stops = [STEPS * (i + 1) // len(path) for i in range(len(path))]
    way: list[segments.Segment] = []
    for i, (layout, stop) in enumerate(zip(path, stops, strict=True)):
        before = ("--resume", str(tmp_path / str(i - 1) / "run")) if i else ()
        way.append(segment(layout, tmp_path / str(i), "--stop-after", str(stop), *before, tied=tied))
    result = segments.run(way)
    assert result.ok, str(result)
    for i, (layout, stop) in enumerate(zip(path, stops, strict=True)):
        assert worst(tmp_path / str(i), plain(tied), stops[i - 1] + 1 if i else 1, stop) < TOLERANCE, str(layout)
        if i:
            end, start = segments.held(way[i - 1].notes, "end"), segments.held(way[i].notes, "begin")
            assert not changed(end, start, tied), f"{path[i - 1]} -> {layout}"
            assert changed(start, segments.held(way[i].notes, "end"), tied), "a step changes something"


DDP, FSDP, PP = KINDS["ddp"][0], KINDS["fsdp"][0], Layout("pipeline_gpt", 2, ("--pp", "2"), 1)
NORM = "stage.norm if is_last else None"
LOAD = "start.restore(found.path, args.init, model, optimizer)"
FRESH = "from common import keymap; from common.state import checkpoint; keymap.create_state(optimizer)"
SWAPPED = f"""{FRESH}; checkpoint.load(
    found.path,
    {{name.translate(str.maketrans("01", "10")): t for name, t in keymap.tensors(model, optimizer).items()}},
)"""
WEIGHTS_ONLY = f"{FRESH}; checkpoint.load(found.path, keymap.model_tensors(model))"
FROM_0 = "stage.blocks = nn.ModuleDict({str(j): b for j, b in enumerate(stage.blocks.values())})"
# Who continues, with which defect; ddp_gpt has begun without one.
MUTANTS: dict[str, tuple[Layout, mutants.Changes]] = {
    "two layers are swapped": (FSDP, {"main": {LOAD: SWAPPED}}),
    "the optimizer's state is not loaded": (FSDP, {"main": {LOAD: WEIGHTS_ONLY}}),
    "a stage counts its layers from its own 0": (
        PP,
        {"make_stage": {f"stage.norm = {NORM}": f"stage.norm = {NORM}; {FROM_0}"}},
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_fails(mutant: str, begin: Begin, segment: Make, plain: Callable, tmp_path: Path) -> None:
    """Each of these defects is seen in the bits, and in what comes of them."""
    layout, defect = MUTANTS[mutant]
    path = mutants.mutate(layout.recipe, tmp_path, defect)
    last = STOP + MORE
    # What compares the replicas in a run would see the third as well.
    how = ("--resume", str(begin(DDP).run), "--stop-after", str(last), "--check-every", "0")
    one = segment(layout, tmp_path, *how, mutant=path)
    result = segments.run([one])
    assert result.ok, str(result)
    assert changed(begin(DDP).held, segments.held(one.notes, "begin"), False)
    assert worst(tmp_path, plain(False), STOP + 1, last) > 1e-6


def test_drifted_copy_is_seen(begin: Begin, segment: Make, plain: Callable, tmp_path: Path) -> None:
    """A checkpoint has one embedding. Here the two copies of a tied one have drifted apart before it was saved."""
    defect = {"forward_backward": {"if model.tied_group: ...": "if False: ..."}}
    path = mutants.mutate("pipeline_gpt", tmp_path, defect)
    begun = begin(PP, True, "--check-every", "0", mutant=path)
    last = STOP + MORE
    one = segment(DDP, tmp_path, "--resume", str(begun.run), "--stop-after", str(last), tied=True)
    result = segments.run([one])
    assert result.ok, str(result)
    assert "embed.weight" in changed(begun.held, segments.held(one.notes, "begin"), True)
    assert worst(tmp_path, plain(True), STOP + 1, last) > 1e-6
