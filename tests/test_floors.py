"""common/ is a house: each floor uses the floors below it, nothing runs in a circle, and nothing speaks backwards."""

import ast
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import floors

ROOT = Path(__file__).resolve().parents[1]
# Variables that their own module changes, and why that may outlive a training in its process.
KEPT = {
    "common.keymap._counters_of": "remembers which numbers an optimizer counts, and forgets them with it",
    "common.train.data._idle": "idle loader workers, which end with their data set",
    "common.workloads.image_decode._noted": "a note that a process prints once",
}


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of common/ and the recipes."""
    folder = tmp_path_factory.mktemp("house")
    for part in ("common", "recipes"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    return folder


@pytest.fixture
def house(copied: Path) -> Iterator[Path]:
    """The same to plant something in, which is taken out again."""
    before = sizes(copied)
    yield copied
    for path in {path for path, _ in sizes(copied).items() ^ before.items()}:
        if path in before:
            shutil.copy2(ROOT / path.relative_to(copied), path)
        else:
            path.unlink()
    assert sizes(copied) == before


def sizes(folder: Path) -> dict[Path, int]:
    """Of its sources."""
    return {path: path.stat().st_size for path in folder.rglob("*.py")}


def plant(house: Path, file: str, text: str) -> str:
    """Write at the end of a file, and return its module's name."""
    path = house / file
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        out.write(f"\n\n{text}\n")
    return ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")


# --- The house as it is -----------------------------------------------------------------------------------


def test_floors_from_top_to_bottom() -> None:
    """Every module lies on a floor, and every floor has modules."""
    order = "session protect measure track state store run workloads train ground"
    assert " ".join(floors.FLOORS) == order
    lived_in = {floors.floor(name) for name in floors.modules(ROOT)}
    assert lived_in == set(floors.FLOORS)


@pytest.mark.parametrize("kind", [floors.upward, floors.leaning, floors.hidden, floors.foreign, floors.backwards])
def test_common_has_none(kind: Callable[[Path], list[object]]) -> None:
    assert list(map(str, kind(ROOT))) == []


def test_common_has_no_circle() -> None:
    arrows = floors.arrows(ROOT)
    assert len(arrows) > 100
    assert floors.circles(arrows) == []


def test_what_modules_keep() -> None:
    assert floors.kept(ROOT) == sorted(KEPT)


# --- Imports ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "text", "target"),
    [
        ("common/ranks.py", "from common.run import exits", "common.run.exits"),
        ("common/train/schedule.py", "from common.state.checkpoint import find", "common.state.checkpoint"),
        ("common/run/exits.py", "from common import session", "common.session"),
        ("common/run/exits.py", "from common.session import Session", "common.session"),
        ("common/state/saver.py", "from common.protect import watch as anything", "common.protect.watch"),
        ("common/measure/pace.py", "from common.protect import watch", "common.protect.watch"),
        ("common/train/schedule.py", "from ..run import exits", "common.run.exits"),
        ("common/train/schedule.py", "from .. import session", "common.session"),
        ("common/seed.py", "from .run.exits import entry", "common.run.exits"),
        ("common/seed.py", "import common.run.exits as exits", "common.run.exits"),
        ("common/seed.py", "def f():\n    from common.run import exits", "common.run.exits"),
        (
            "common/seed.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from common.run import exits",
            "common.run.exits",
        ),
        ("common/seed.py", "try:\n    from common.run import exits\nexcept ImportError: ...", "common.run.exits"),
        ("common/seed.py", "importlib.import_module('common.run.exits')", "common.run.exits"),
        ("common/seed.py", "sys.modules['common.run.exits']", "common.run.exits"),
    ],
)
def test_upward_import_is_found(house: Path, file: str, text: str, target: str) -> None:
    module = plant(house, file, text)
    assert [(one.module, one.target) for one in floors.upward(house)] == [(module, target)]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("common/session.py", "from common.run import exits"),
        ("common/session.py", "from common.protect import watch"),
        ("common/protect/watch.py", "from common.protect import heartbeat"),
        ("common/train/schedule.py", "from common import UserError, ranks"),
    ],
)
def test_downward_import_is_right(house: Path, file: str, text: str) -> None:
    plant(house, file, text)
    for kind in (floors.upward, floors.leaning, floors.hidden, floors.foreign):
        assert kind(house) == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("common/protect/watch.py", "from common.measure import pace"),
        ("common/state/saver.py", "from common.measure import pace"),
        ("common/seed.py", "from common.protect.watch import Watch"),
    ],
)
def test_import_of_a_deletable_floor_is_found(house: Path, file: str, text: str) -> None:
    module = plant(house, file, text)
    assert [one.module for one in floors.leaning(house)] == [module]


def neighbours(floor: str) -> tuple[str, str]:
    """A module of a floor, and one there that it imports."""
    return min((a, b) for a, b in floors.arrows(ROOT) if floors.floor(a) == floors.floor(b) == floor)


# Floors of which a module imports another one: each but the roof, and measure, whose modules do not know each other.
# By name: to read all imports takes a second, in each process that collects tests.
LINKED = [floor for floor in floors.FLOORS if floor not in ("session", "measure")]


def test_almost_all_floors_are_linked() -> None:
    assert {floors.floor(a) for a, b in floors.arrows(ROOT) if floors.floor(a) == floors.floor(b)} == {*LINKED}


@pytest.mark.parametrize("floor", LINKED)
@pytest.mark.parametrize("hidden", ["", "def f():\n    ", "if TYPE_CHECKING:\n    "], ids=["top", "function", "types"])
def test_circle_is_found(house: Path, floor: str, hidden: str) -> None:
    above, below = neighbours(floor)
    folder, _, name = above.rpartition(".")
    plant(house, f"{below.replace('.', '/')}.py", f"{hidden}from {folder} import {name}")
    (circle,) = floors.circles(floors.arrows(house))
    assert {above, below} <= {*circle}


def test_circle_of_three_is_found_once() -> None:
    pairs = [("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"), ("c", "e"), ("e", "f"), ("f", "e")]
    assert floors.circles(pairs) == [("a", "b", "c"), ("e", "f")]
    assert floors.circles(pairs[3:6]) == []


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("common/run/exits.py", "def f():\n    from common import seed", "inside a function"),
        ("common/run/exits.py", "class A:\n    def f(self):\n        from common import seed", "inside a function"),
        ("common/run/exits.py", "async def f():\n    from .. import seed", "inside a function"),
        ("common/run/exits.py", "importlib.import_module('common.seed')", "by a string"),
        ("common/run/exits.py", "__import__('common.seed')", "by a string"),
        ("common/run/exits.py", "import common.seed", "write `from"),
        ("common/session.py", "from common import run", "name the module"),
        ("common/session.py", "from common.run import Anything", "name the module"),
        ("common/run/__init__.py", "from common import seed", "for all who import"),
    ],
)
def test_hidden_import_is_found(house: Path, file: str, text: str, why: str) -> None:
    module = plant(house, file, text)
    (found,) = floors.hidden(house)
    assert (found.module, why in found.hides) == (module, True), str(found)


def test_folder_without_a_floor_is_found(house: Path) -> None:
    plant(house, "common/attic/box.py", "from common import seed")
    with pytest.raises(AssertionError, match="attic"):
        floors.upward(house)


@pytest.mark.parametrize(
    ("file", "text", "what"),
    [
        ("recipes/ddp_gpt/train.py", "from recipes.ddp_resnet import train", "recipes"),
        ("recipes/ddp_gpt/train.py", "def f():\n    from tools import about", "tools"),
        ("recipes/ddp_gpt/train.py", "import launch.agent", "launch"),
        ("recipes/ddp_gpt/train.py", "from .helper import f", "a neighbour"),
        ("recipes/ddp_gpt/helper.py", "import train", "train"),
        ("common/seed.py", "from recipes.ddp_gpt.train import Args", "recipes"),
        ("common/seed.py", "from launch import agent", "launch"),
        ("common/seed.py", "from tests.harness import runner", "tests"),
        ("common/seed.py", "def f():\n    import benchmarks.bare", "benchmarks"),
        ("common/seed.py", "import tools", "tools"),
    ],
)
def test_foreign_import_is_found(house: Path, file: str, text: str, what: str) -> None:
    plant(house, file, text)
    (found,) = floors.foreign(house)
    assert found.startswith(f"{file}:")
    assert found.endswith(f"imports {what}")


def test_names_lead_to_all_that_they_import(house: Path) -> None:
    """Of a module, all that it imports, with what that imports; and nothing else."""
    alone = floors.closure(house, "ranks")
    assert alone == ["common.ranks"]
    plant(house, "common/train/schedule.py", "def f():\n    from common.run import exits")
    found = set(floors.closure(house, "schedule"))
    assert found == {"common.train.schedule", "common.run.exits", *floors.closure(house, "exits")}


# --- Nothing speaks backwards -----------------------------------------------------------------------------

HEAD = "import sys\nfrom common.run import exits, stop as halt\nfrom common.run.process import World\n"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("def f():\n    global step\n    step = 1", "has `global step`"),
        ("exits.report = print", "changes common.run.exits.report"),
        ("def f():\n    exits.report = print", "changes common.run.exits.report"),
        ("exits.count += 1", "changes common.run.exits.count"),
        ("del halt.latest", "changes common.run.stop.latest"),
        ("exits.NAMES[0] = 1", "changes common.run.exits.NAMES"),
        ("exits.NAMES.append(1)", "changes common.run.exits.NAMES"),
        ("halt.TABLE['a'].update(b=1)", "changes common.run.stop.TABLE['a']"),
        ("exits.WORLD.place.rank = 1", "changes common.run.exits.WORLD.place"),
        ("for exits.step in range(3): ...", "changes common.run.exits.step"),
        ("with open('a') as exits.file: ...", "changes common.run.exits.file"),
        ("World.rank = 1", "changes common.run.process.World"),
        ("World.KNOWN.append(1)", "changes common.run.process.World.KNOWN"),
        ("setattr(exits, 'report', print)", "has setattr(common.run.exits)"),
        ("vars(exits)['report'] = print", "has vars(common.run.exits)"),
        ("exits.__dict__['report'] = print", "takes the variables of common.run.exits"),
        ("sys.argv += ['--name', 'x']", "changes sys.argv"),
        ("sys.argv = []", "changes sys.argv"),
        ("sys.argv[1:] = []", "changes sys.argv"),
        ("del sys.argv[0]", "changes sys.argv"),
        ("sys.argv.extend(['--name', 'x'])", "changes sys.argv"),
        ("from sys import argv", "takes argv out of sys: somebody may change it"),
        ("from common.session import planted", "uses common.session.planted, a variable"),
        ("from common import session\nprint(session.planted.size)", "uses common.session.planted, a variable"),
    ],
)
def test_what_speaks_backwards_is_found(house: Path, text: str, what: str) -> None:
    plant(house, "common/session.py", "planted: list[int] = []")
    (house / "common" / "planted.py").write_text(HEAD + text)
    found = [line.partition(" ")[2] for line in floors.backwards(house)]
    assert what in found
    assert all(line.startswith("common.planted:") for line in floors.backwards(house))


@pytest.mark.parametrize(
    "text",
    [
        "def f(exits):\n    exits.report = print",
        "def f():\n    exits = World()\n    exits.ended = True",
        "class A:\n    def f(self):\n        self.exits.append(1)",
        "def f(world: World):\n    world.process.watch = None",
        "exits.add(1)",  # a function of the module that is called so
        "print(sys.argv[1:], len(sys.argv))",
        "sys.argv.index('--name')",
        "from common.session import Planted\nPlanted()",
    ],
)
def test_what_does_not(house: Path, text: str) -> None:
    plant(house, "common/session.py", "Planted = dict[str, int]")
    (house / "common" / "planted.py").write_text(HEAD + text)
    assert floors.backwards(house) == []


@pytest.mark.parametrize(
    "text",
    [
        "kept: list[int] = []\ndef f():\n    kept.append(1)",
        "kept = {}\ndef f(key):\n    kept[key] = 1",
        "kept = {}\nclass A:\n    def f(self):\n        del kept['a']",
        "kept = World()\ndef f():\n    kept.rank = 1",
        "kept = 0\ndef f():\n    global kept\n    kept += 1",
    ],
)
def test_what_a_module_keeps_is_found(house: Path, text: str) -> None:
    (house / "common" / "planted.py").write_text(HEAD + text)
    assert set(floors.kept(house)) - {*KEPT} == {"common.planted.kept"}


@pytest.mark.parametrize(
    "text",
    [
        "kept = []\nkept.append(1)",  # while it is imported
        "kept = {}\ndef f(kept):\n    kept['a'] = 1",
        "kept = {}\ndef f():\n    return kept.get('a')",
    ],
)
def test_what_it_does_not_keep(house: Path, text: str) -> None:
    (house / "common" / "planted.py").write_text(HEAD + text)
    assert set(floors.kept(house)) <= {*KEPT}


# --- The tests put nothing back ---------------------------------------------------------------------------


def put_back(text: str) -> Iterator[int]:
    """Lines that fill in the variables of modules by their dictionaries, as if no training had been."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "update":
            owner = ast.unparse(node.func.value)
            if "sys.modules" in owner and ("vars(" in owner or "__dict__" in owner):
                yield node.lineno


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "harness").glob("*.py")), ids=lambda path: path.name)
def test_harness_puts_no_variables_back(path: Path) -> None:
    assert list(put_back(path.read_text())) == []


def test_what_puts_them_back_is_found() -> None:
    assert list(put_back("vars(sys.modules[name]).update(before)")) == [1]
    assert list(put_back("sys.modules[name].__dict__.update(before)")) == [1]
    assert list(put_back("os.environ.update(before)")) == []
