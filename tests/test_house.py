"""The house in figures (tests/house.py): each is right, and no light burns."""

import json
import shutil
import textwrap
from pathlib import Path

import pytest

from tests import floors, house
from tests.harness import runner

COMMON = {
    "__init__.py": '"""Plumbing."""\n\n\nclass UserError(ValueError):\n    """An error."""\n',
    "session.py": textwrap.dedent("""\
        from dataclasses import dataclass

        from common import seed
        from common.protect import watch  # protect
        from common.run import exits


        @dataclass
        class RunArgs(
            watch.WatchArgs,  # protect
        ):
            name: str = ""  # of the run
            keep: int = 2


        class Session:
            def step(self):
                seed.everything()
                self.watch.step()  # of a hang  # protect
        """),
    "protect/watch.py": 'from common import seed\n\n\nclass WatchArgs:\n    timeout: float = 1.0\n\n\nNAME = "a"\n',
    "measure/pace.py": '"""Pace."""\n',
    "track/tracker.py": "HERE = 3\n",
    "state/saver.py": "from common.run import exits\n",
    "store/disk.py": "HERE = 1\n",
    "store/objects/keeper.py": "THERE = 2\n",
    "run/exits.py": "from common import seed\nnow = []\n\n\ndef f():\n    now.append(1)\n",
    "train/data.py": "",
    "workloads/gpt.py": "from common.workloads.names import NAMES\n",
    "workloads/names.py": "from common.workloads import gpt\n\nNAMES = []\n",
    "seed.py": "X = 1  # why\n",
}
BASE = '''"""Trains.

Base: none.
"""

from common import seed, session
from common.run.exits import f


class Args(session.RunArgs):
    """Flags."""

    lr: float = 0.1
    keep: int = 3


def main() -> None:
    """Train.

    To the end.
    """
    # First.
    step = seed.everything(
        0,  # a number
    )
    run, f_of = session.Session(), f(step)
    run.step(print(f_of))


main()
'''
RECIPES = {
    "ddp_resnet/train.py": BASE,
    "ddp_resnet/bare.py": "X = 1\nY = 2\n",
    "multinode_resnet/train.py": BASE.replace("Base: none.", "Base: recipes/ddp_resnet.").replace("lr:", "rate:"),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout of a few lines."""
    texts = {f"common/{name}": text for name, text in COMMON.items()}
    texts |= {f"recipes/{name}": text for name, text in RECIPES.items()}
    texts |= {"launch/torchrun.sh": "a\nb\n", "launch/README.md": "x\n", "recipes/ddp_resnet/README.md": "x\n"}
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_no_light_burns() -> None:
    assert house.lights() == []


def test_figures(root: Path) -> None:
    found = house.figures(root)
    assert found["common/"] == {
        "files": 13,
        "lines of code without workloads, store and track": 25,
        "lines of code of workloads": 3,
        "lines of code of store": 2,
        "lines of code of track": 1,
        "modules of more than 200 lines of code": 0,
        "arrows": 8,
        "circles": 1,
        "upward imports": 0,
        "imports that hide": 0,
        "lines that speak backwards": 0,
        "variables of modules that functions change": 1,
    }
    assert found["ddp_resnet"] == {
        "lines of code": 12,
        "of bare.py": 2,
        "own flags": 2,
        "all flags": 4,  # lr, keep, name, timeout
        "names outside": 4,  # seed.everything, session.RunArgs, session.Session, exits.f
        "main: lines": 5,
        "calls out": 4,  # everything, Session, f, run.step
        "locals": 3,
    }
    assert found["multinode_resnet"]["of bare.py"] is None
    assert found["changed lines of code of a lesson"] == {"ddp_resnet -> multinode_resnet": 2}


def test_copy_and_what_may_be_deleted(root: Path) -> None:
    """Every line of programs counts, whatever is in it; a floor takes its marked lines with it."""
    lines = {name: len(text.splitlines()) for name, text in COMMON.items()}
    whole = sum(lines.values()) + sum(len(RECIPES[f"ddp_resnet/{name}.py"].splitlines()) for name in ("train", "bare"))
    protect = lines["protect/watch.py"] + 3
    assert house.figures(root)["lines that a copy of ddp_resnet brings"] == {
        "whole": whole + 2,
        "without protect/": whole + 2 - protect,
        "without measure/": whole + 2 - 1,
        "without track/": whole + 2 - 1,
        "without all": whole + 2 - protect - 1 - 1,
    }


@pytest.mark.parametrize(
    ("file", "more", "light"),
    [
        ("common/seed.py", "X = 1\n" * house.MODULE, "common.seed, lines of code: 201, more than 200"),
        ("recipes/ddp_resnet/train.py", "X = 1\n" * house.RECIPE, "ddp_resnet, lines of code: 312, more than 300"),
        (
            "recipes/ddp_resnet/bare.py",
            "X = 1\n" * house.TWIN,
            "ddp_resnet, lines of code of bare.py: 122, more than 120",
        ),
    ],
)
def test_long_file_turns_a_light_on(
    root: Path, monkeypatch: pytest.MonkeyPatch, file: str, more: str, light: str
) -> None:
    monkeypatch.setattr(house, "LESSONS", {})
    assert house.lights(root) == []
    with (root / file).open("a") as out:
        out.write(more)
    assert house.lights(root) == [light]


@pytest.mark.parametrize(
    ("budget", "most", "lights"),
    [
        ("COMMON", 24, ["common/ without workloads, store and track, lines of code: 25, more than 24"]),
        ("STORE", 1, ["common/store, lines of code: 2, more than 1"]),
        ("TRACK", 0, ["common/track, lines of code: 1, more than 0"]),
        ("MAIN", 4, [f"{name}, lines of main: 5, more than 4" for name in ("ddp_resnet", "multinode_resnet")]),
        ("CALLS", 3, [f"{name}, calls out of main: 4, more than 3" for name in ("ddp_resnet", "multinode_resnet")]),
        ("LOCALS", 2, [f"{name}, locals of main: 3, more than 2" for name in ("ddp_resnet", "multinode_resnet")]),
        ("FLAGS", {"resnet": 1}, ["ddp_resnet, flags of its own: 2, more than 1"]),
        (
            "LESSONS",
            {("ddp_resnet", "multinode_resnet"): 1},
            ["ddp_resnet -> multinode_resnet, changed lines of code: 2, more than 1"],
        ),
    ],
)
def test_smaller_budget_turns_lights_on(
    root: Path, monkeypatch: pytest.MonkeyPatch, budget: str, most: object, lights: list[str]
) -> None:
    monkeypatch.setattr(house, "LESSONS", {})
    monkeypatch.setattr(house, budget, most)
    assert house.lights(root) == lights


def test_standing_for_a_workload_means_the_same_to_the_runner() -> None:
    for recipe in runner.RECIPES:
        assert house.stands_for_workload(house.ROOT, recipe) == runner.stands_for_workload(recipe)
        assert house.base(house.recipes()[recipe]) == runner.base(recipe)


def test_before_and_after(root: Path, capsys: pytest.CaptureFixture) -> None:
    """Another checkout stands beside this one, also if its common/ has no floors."""
    for folder in floors.FLOORS[1:-1]:
        for path in (root / "common" / folder).rglob("*.py"):
            path.rename(root / "common" / path.name)
        shutil.rmtree(root / "common" / folder)
    house.main(["--beside", str(root), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["before", "after", "lights"]
    assert (found["before"]["common/"]["upward imports"], found["after"]["common/"]["upward imports"]) == (None, 0)
    assert found["after"] == house.figures()
    house.main(["--beside", str(root)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["common/", "before", "after"] in lines
    assert ["files", "13", f"{found['after']['common/']['files']}"] in lines
    after = found["after"]["ddp_resnet"]["lines of code"]
    assert ["ddp_resnet", "12", ">", str(after)] in [line[:4] for line in lines]


def test_checkout_is_read_and_not_imported(root: Path) -> None:
    (root / "common" / "seed.py").write_text("raise SystemExit(1)\n")
    shutil.rmtree(root / "launch")
    assert house.figures(root)


def test_lines_of_code() -> None:
    """Neither docstrings nor comments nor blank lines; a text that is a value, and code before a comment, count."""
    text = '"""Doc."""\n\nx = 1  # why\n# no\n\n\ndef f():\n    """Doc\n    more."""\n    return """a\nb"""\n'
    assert house.code(text) == ["x = 1", "def f():", '    return """a', 'b"""']
    assert house.changed(text, text.replace("# why", "# because").replace("x = 1", "x = 2")) == 2
    assert house.changed(text, text.replace("# why", "# because").replace("Doc", "Words")) == 0
