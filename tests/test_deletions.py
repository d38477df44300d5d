"""What docs/adapt.md says that one may delete is deleted here, by its own commands; the numbers stay the same bits.

A copy of a recipe and common/ trains on two ranks, stops and resumes, as it is and without a floor or what its main
marks as optional. Each rank is a fork that forgets the repository's common/ and imports the copy's.
"""

import ast
import hashlib
import io
import itertools
import json
import re
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors import deserialize

from tests import floors, house
from tests.harness import runner
from tests.harness.once import Once
from tests.launch.test_launch import launch

BASES = [recipe for recipe in runner.RECIPES if runner.stands_for_workload(recipe)]
PAGE = (runner.ROOT / "docs" / "adapt.md").read_text()
COMMANDS = {found[1]: found[0] for found in re.finditer(r"^rm -r common/(\w+) && .*$", PAGE, flags=re.MULTILINE)}
# Every choice of floors; what main marks, with the comparison of replicas, which a flag ends; and all at once.
FLOORS = [chosen for n in (1, 2, 3) for chosen in itertools.combinations(floors.DELETABLE, n)]
MAIN = "main"
DELETIONS = [*FLOORS, (MAIN,), (MAIN, *floors.DELETABLE)]
STEPS = 4
STOP = 2


def copy(recipe: str, folder: Path) -> Path:
    """A project of its own, as docs/adapt.md makes it; returns its train.py."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(runner.ROOT / "recipes" / recipe, folder, ignore=ignored, dirs_exist_ok=True)
    shutil.copytree(runner.ROOT / "common", folder / "common", ignore=ignored)
    return folder / "train.py"


def delete(project: Path, *what: str) -> None:
    """Delete floors from a project, and what its main marks as optional."""
    for one in what:
        if one == MAIN:
            text, _ = without_optional(project.joinpath("train.py").read_text())
            project.joinpath("train.py").write_text(text)
        else:
            subprocess.run(["bash", "-c", COMMANDS[one]], cwd=project, check=True)


# --- What is optional in main -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """A comment that says what an adopter may delete.

    Attributes:
        line: of the code that it is about: the next one, or its own.
        whole: whether all of that statement may go; otherwise arguments that the comment names.
        text: what follows the word.
    """

    line: int
    whole: bool
    text: str


def marks(text: str) -> Iterator[Mark]:
    """Comments of a train.py with the word "optional" at their beginning, or before the names of arguments."""
    lines = text.splitlines()
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    done = 0
    for first, comment in comments.items():
        if first <= done:
            continue
        line = first
        while lines[line - 1].lstrip().startswith("#"):  # a block, which is about the line below it
            done = line
            comment += f" {comments[line]}" * (line > first)  # noqa: PLW2901 (grows)
            line += 1
        before, word, after = comment.partition("ptional")
        if word:
            yield Mark(line, before in ("O", "o"), after)


def without_optional(text: str) -> tuple[str, list[str]]:
    """A train.py without what its main marks as optional; and the source of what has gone.

    Raises:
        AssertionError: a mark is about nothing, or something that stays needs what goes.
    """
    tree = ast.parse(text)
    (main,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    statements = {node.lineno: node for node in ast.walk(main) if isinstance(node, ast.stmt)}
    found = [mark for mark in marks(text) if main.lineno <= mark.line <= main.end_lineno]
    drop: set[ast.AST] = set()
    for mark in found:
        statement = statements[mark.line]
        named = [one for one in ast.walk(statement) if isinstance(one, ast.keyword) and one.arg in words(mark.text)]
        assert mark.whole or named, f"line {mark.line}: {mark.text}"
        drop |= {statement} if mark.whole else {*named}
    gone = [ast.unparse(node) for node in drop]
    names = {
        name.id
        for node in drop
        for name in ast.walk(node)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    }
    for call in [node for node in ast.walk(main) if isinstance(node, ast.Call)]:
        drop |= {one for one in call.keywords if isinstance(one.value, ast.Name) and one.value.id in names}
        if call.args and isinstance(call.args[-1], ast.Name) and call.args[-1].id in names:
            drop.add(call.args[-1])
    tree = _Without(drop).visit(tree)
    left = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in names}
    assert not left, f"main still uses {left}"
    return ast.unparse(tree), gone


def words(text: str) -> set[str]:
    return {*re.findall(r"\w+", text)}


class _Without(ast.NodeTransformer):
    """Leaves nodes out."""

    def __init__(self, drop: set[ast.AST]) -> None:
        self._drop = drop

    def visit(self, node: ast.AST) -> Any:
        return None if node in self._drop else super().visit(node)


@pytest.mark.parametrize("recipe", runner.RECIPES)
def test_what_main_marks(recipe: str) -> None:
    """Each recipe that reads samples has the three marks that docs/adapt.md lists; the rest of main stands alone."""
    text, gone = without_optional(runner.source(recipe))
    assert ast.parse(text)
    wanted = ["flops.count_sample", "step_loss.check", "data="] if recipe in runner.SUPERVISED else []
    for part in wanted:
        assert sum(part in one for one in gone) == 1, gone
        main = runner.sections(runner.source(recipe))[5]
        assert main.count(part) == 1
        assert part not in text[text.index("def main") :]


@pytest.mark.parametrize(
    ("lines", "left", "gone"),
    [
        ("# Optional: why.\n# More.\na = f(1)\ng(0, a)\ng(x, b=a)", "g(0)\ng(x)", ["a = f(1)"]),
        ("g()\nf(1)  # optional: why", "g()", ["f(1)"]),
        (
            "# Finds. Optional: seed and data.\na = f(1, seed=2, data=3, more=4)",
            "a = f(1, more=4)",
            ["seed=2", "data=3"],
        ),
        ("# No mark.\nf(1)  # a number", "f(1)", []),
    ],
)
def test_what_a_mark_is_about(lines: str, left: str, gone: list[str]) -> None:
    text, found = without_optional("def main():\n    " + lines.replace("\n", "\n    "))
    assert text == "def main():\n    " + left.replace("\n", "\n    ")
    assert sorted(found) == sorted(gone)


@pytest.mark.parametrize(
    "lines", ["# Optional: why.\na = f(1)\nb = a + 1", "# Finds. Optional: what is not there.\na = f(1, seed=2)"]
)
def test_wrong_mark_is_found(lines: str) -> None:
    with pytest.raises(AssertionError):
        without_optional("def main():\n    " + lines.replace("\n", "\n    "))


# --- What is left holds together --------------------------------------------------------------------------


def faults(project: Path) -> list[str]:
    """What of a project's source refers to something that has been deleted."""
    found = []
    roof = project / "common" / "session.py"
    try:
        ast.parse(roof.read_text())
    except SyntaxError as error:
        return [f"session.py: {error}"]
    whole = floors.modules(runner.ROOT)
    for path in [project / "train.py", *project.glob("common/**/*.py")]:
        for node in floors.import_nodes(path.read_text()):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("common"):
                names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)} & whole.keys()
                missing = [
                    name for name in names if not project.joinpath(whole[name].relative_to(runner.ROOT)).exists()
                ]
                found += [f"{path.relative_to(project)}:{node.lineno} imports {name}" for name in sorted(missing)]
    found += [f"session.py uses self.{name}" for name in sorted(unset(roof.read_text()))]
    # Names that nothing defines, and imports that nothing uses any more.
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select=F", "--output-format=concise"]
    checked = subprocess.run([*ruff, roof], capture_output=True, text=True, check=False)
    assert checked.returncode in {0, 1}, checked.stderr
    found += [line for line in checked.stdout.splitlines() if line.startswith(str(roof))]
    flags = house.flags(runner.ROOT, runner.ROOT / "common" / "session.py", "RunArgs")[1]
    for flag in flags - house.flags(project, roof, "RunArgs")[1]:
        for path in [project / "train.py", *project.glob("common/**/*.py")]:
            found += [f"{path.relative_to(project)} reads args.{flag}"] * (f"args.{flag}" in path.read_text())
    return found


def unset(text: str) -> set[str]:
    """Attributes that methods of a file's classes read of self, and that none of them sets."""
    found = set()
    for one in [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]:
        nodes = [
            node for node in ast.walk(one) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
        ]
        known = {node.attr for node in nodes if isinstance(node.ctx, ast.Store)}
        known |= {node.name for node in one.body if isinstance(node, ast.FunctionDef)}
        found |= {node.attr for node in nodes} - known
    return found


def test_page_has_a_command_for_each_floor() -> None:
    assert sorted(COMMANDS) == sorted(floors.DELETABLE)


@pytest.mark.parametrize("recipe", BASES)
@pytest.mark.parametrize("what", FLOORS, ids="+".join)
def test_rest_holds_together(recipe: str, what: Sequence[str], tmp_path: Path) -> None:
    train = copy(recipe, tmp_path)
    assert faults(tmp_path) == []
    before = house.flags(tmp_path, train)[1]
    delete(tmp_path, *what)
    assert faults(tmp_path) == []
    assert {"protect": "hang_timeout", "measure": "profile", "track": "tracker"}.items() >= {
        (floor, flag) for floor, flag in zip(what, sorted(before - house.flags(tmp_path, train)[1]), strict=True)
    }


@pytest.mark.parametrize("floor", floors.DELETABLE)
def test_forgotten_line_is_found(floor: str, tmp_path: Path) -> None:
    """Each marked line has to go, because it refers to what is no longer there; one that sets an attribute may stay."""
    copy(BASES[0], tmp_path)
    roof = tmp_path / "common" / "session.py"
    text = roof.read_text()
    numbers = house.marked(text, floor)
    assert len(numbers) > 3
    shutil.rmtree(tmp_path / "common" / floor)
    lines = text.splitlines(keepends=True)
    roof.write_text(text)
    assert faults(tmp_path)
    for kept in numbers:
        roof.write_text("".join(line for n, line in enumerate(lines, 1) if n == kept or n not in numbers))
        assert faults(tmp_path) or re.match(r" +self\.\w+ = ", lines[kept - 1]), lines[kept - 1]


# --- The numbers stay -------------------------------------------------------------------------------------


def run_copy(path: str, argv: list[str]) -> None:
    """Run a project's train.py in this process, with the project's common/ instead of the repository's."""
    project = Path(path).parent
    for name in [name for name in sys.modules if name.partition(".")[0] == "common"]:
        del sys.modules[name]
    sys.path.insert(0, str(project))
    from common.train import flops

    flops.peak_flops = lambda *_: (1e12, "")  # measuring takes as long as a short training
    runner.run_path(path, argv)
    files = {Path(module.__file__ or "") for name, module in sys.modules.items() if name.partition(".")[0] == "common"}
    assert len(files) > 20
    assert all(file.is_relative_to(project) for file in files), files


def flags_of(recipe: str, data: dict[str, Path]) -> list[str]:
    flags = [*runner.small(recipe), "--max-steps", str(STEPS), "--log-every", "1", "--eval-every", "2"]
    if recipe in runner.SUPERVISED:
        flags += ["--data", str(data[runner.workload(recipe)]), "--global-batch-size", "8"]
    return [*flags, "--check-every", "2", "--name", "run"]


def train(path: Path, *flags: str) -> dict[str, Any]:
    """Stop and resume a training of two ranks; returns its numbers."""
    out = path.parent / "runs"
    for more in (("--stop-after", str(STOP)), ()):
        result = runner.spawn(run_copy, 2 * [(str(path), [str(path), *flags, "--out", str(out), *more])])
        assert result.ok, str(result)
    assert f"resuming from step {STOP}" in result.outputs[0]
    return numbers(out / "run")


def numbers(run: Path) -> dict[str, Any]:
    """What a run has recorded at each step, but for times; and the bytes of the tensors that it has saved."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{tag: value for tag, value in line.items() if not tag.startswith(("perf/", "time"))} for line in lines]
    files = sorted((run / "checkpoints" / f"step_{STEPS:08d}").glob("*.safetensors"))
    tensors = {name: part["data"] for file in files for name, part in deserialize(file.read_bytes())}
    return {"lines": kept, "tensors": {name: hashlib.sha256(data).hexdigest() for name, data in tensors.items()}}


@pytest.fixture(scope="module")
def wanted(small_data: dict[str, Path], once: Once, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Numbers of the whole copy of a recipe."""

    def numbers_of(recipe: str) -> dict[str, Any]:
        found = train(copy(recipe, tmp_path_factory.mktemp(recipe)), *flags_of(recipe, small_data))
        curve = [line[runner.curve(recipe)] for line in found["lines"] if runner.curve(recipe) in line]
        assert len({*curve}) == STEPS
        return found

    return lambda recipe: once.value(lambda: numbers_of(recipe), "numbers of a whole copy", recipe)


@pytest.mark.parametrize(
    ("recipe", "what"),
    [
        # Of one recipe each deletion alone, and of all recipes all at once; `-m rest` has what is left.
        pytest.param(
            recipe, what, marks=[pytest.mark.rest] * ((recipe != "ddp_gpt" or len(what) > 1) and what != DELETIONS[-1])
        )
        for recipe in BASES
        for what in DELETIONS
        if what != (MAIN,) or recipe in runner.SUPERVISED
    ],
    ids=lambda one: one if isinstance(one, str) else "+".join(one),
)
def test_same_numbers(
    recipe: str, what: Sequence[str], wanted: Any, small_data: dict[str, Path], tmp_path: Path
) -> None:
    path = copy(recipe, tmp_path)
    delete(tmp_path, *what)
    more = ("--check-every", "0") if MAIN in what else ()
    assert train(path, *flags_of(recipe, small_data), *more) == wanted(recipe)


def test_changed_number_is_found(wanted: Any, small_data: dict[str, Path], tmp_path: Path) -> None:
    """The mutant: a rate that differs in its sixth digit."""
    recipe = "ddp_gpt"
    path = copy(recipe, tmp_path)
    text = path.read_text()
    changed = re.sub(r"(return .*warmup_cosine\(.*)", r"\1 * (1 + 1e-6)", text)
    assert changed != text
    path.write_text(changed)
    found = train(path, *flags_of(recipe, small_data))
    assert found["lines"] != wanted(recipe)["lines"]
    assert found["tensors"] != wanted(recipe)["tensors"]


@pytest.mark.parametrize("floor", floors.DELETABLE)
def test_floor_without_its_lines_does_not_run(floor: str, small_data: dict[str, Path], tmp_path: Path) -> None:
    recipe = "ddp_gpt"
    path = copy(recipe, tmp_path)
    shutil.rmtree(tmp_path / "common" / floor)
    result = runner.spawn(run_copy, [(str(path), [str(path), *flags_of(recipe, small_data)])])
    assert not result.ok
    assert "ImportError" in str(result) or "ModuleNotFoundError" in str(result)


@pytest.mark.rest
def test_launched(small_data: dict[str, Path], tmp_path: Path) -> None:
    """The same by the launcher, in processes that have never seen this repository."""
    copy("ddp_resnet", tmp_path / "project")
    delete(tmp_path / "project", *floors.DELETABLE, MAIN)
    flags = [*flags_of("ddp_resnet", small_data), "--out", "runs", "--model", "resnet18"]
    result = launch("../project", *flags, cwd=tmp_path / "project", NPROC_PER_NODE="2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"done     step {STEPS} of {STEPS}" in result.stdout
