"""A copy of a recipe takes a newer Brigade in, and no line of its owner is lost, however the upgrade ends."""

import functools
import gzip
import io
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import common
import pytest
from tools.copy import copying, merging, records, trees, upgrading
from tools.copy.__main__ import main

from tests.harness import runner

Files = dict[str, str]
TRAIN = "".join(f"line {number}\n" for number in range(1, 61))
OLD: Files = {
    "recipes/one/train.py": f'"""One."""\n{TRAIN}',
    "recipes/one/README.md": "# One\n",
    "recipes/two/train.py": '"""Two."""\nother = 2\n',
    "common/__init__.py": '__version__ = "0.1.0"\n',
    "common/kept.py": "kept = 1\n",
    "common/gone.py": "gone = 1\n",
    "common/changed_and_gone.py": "gone = 2\n",
    "common/moves.py": TRAIN.replace("line", "move"),
    "common/part/a.py": "a = 1\n",
    "common/part/b.py": "b = 1\n",
    "common/weights.bin": "\0one",
    "launch/torchrun.sh": "#!/bin/sh\necho old\n",
    "pyproject.toml": '[project]\nname = "x"\n',
}
NEW: Files = {
    **{path: text for path, text in OLD.items() if path not in ("common/gone.py", "common/changed_and_gone.py")},
    "recipes/one/train.py": OLD["recipes/one/train.py"].replace("line 50\n", "line fifty\n"),
    "common/__init__.py": '__version__ = "0.2.0"\n',
    "common/part/c.py": "c = 1\n",
    "launch/torchrun.sh": "#!/bin/sh\necho new\n",
}
NEW["common/floor/moved.py"] = NEW.pop("common/moves.py").replace("move 9\n", "move nine\n")
MINE = {"line 2\n": "line 2\nmy_flag = 1  # section 1\n", "line 20\n": "my model  # section 2\n"}


def checkout(folder: Path, files: Files) -> Path:
    """A checkout with these files, of which the launcher may be run."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "launch/torchrun.sh").chmod(0o755)
    (folder / "common" / "__pycache__").mkdir()
    (folder / "common" / "__pycache__" / "kept.pyc").write_text("of this machine")
    return folder


class Places:
    """An old checkout, a new one, and a copy of recipe one of the old one."""

    def __init__(self, folder: Path, **changes: str) -> None:
        self.folder = folder
        self.old = checkout(folder / "old", OLD)
        self.new = checkout(folder / "new", NEW | changes)
        self.copy = folder / "mine"
        assert main(["recipes/one", str(self.copy)], self.old) == 0
        edit(self.copy / "train.py", MINE)

    def upgrade(self, *flags: str) -> int:
        return main(["--upgrade", str(self.copy), *flags], self.new)


def edit(path: Path, changes: Mapping[str, str]) -> None:
    text = path.read_text()
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    path.write_text(text)


def snapshot(folder: Path, backups: bool = True) -> dict[str, tuple[bytes, int]]:
    """Every file of a folder, with its mode."""
    found = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name: (path.read_bytes(), path.stat().st_mode)
        for name, path in found.items()
        if backups or not path.name.startswith("before-")
    }


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


# --- A copy ------------------------------------------------------------------------------------------------


def test_copy_is_what_cp_makes(tmp_path: Path) -> None:
    """But for what only other recipes import; and needs nothing that is installed: -S hides it."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "tools.copy", "recipes/dp_resnet", str(tmp_path / "copy")],
        cwd=runner.ROOT,
        capture_output=True,
        text=True,
        timeout=runner.HANG_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    by_cp = Path(shutil.copytree(runner.ROOT / "recipes/dp_resnet", tmp_path / "cp", ignore=compiled))
    for part in ("common", "launch"):
        shutil.copytree(runner.ROOT / part, by_cp / part, ignore=compiled)
    shutil.copy(runner.ROOT / "pyproject.toml", by_cp)
    foreign = trees.foreign(trees.of_checkout(runner.ROOT), "dp_resnet")
    assert "common/workloads/gpt.py" in foreign
    assert not foreign & {
        f"common/workloads/{name}.py" for name in ("__init__", "resnet", "images", "dataset", "rates")
    }
    for path in foreign:
        (by_cp / path).unlink()
    copy = snapshot(tmp_path / "copy")
    assert {"train.py", "README.md", "launch.env", "pyproject.toml", "launch/torchrun.sh"} < copy.keys()
    assert {name: one for name, one in copy.items() if not name.startswith(".brigade/")} == snapshot(by_cp)
    assert (tmp_path / "copy").stat().st_mode == by_cp.stat().st_mode
    assert os.listdir(tmp_path) == ["copy", "cp"] or os.listdir(tmp_path) == ["cp", "copy"]


compiled = shutil.ignore_patterns("__pycache__")


@pytest.mark.parametrize("recipe", runner.RECIPES)
def test_each_import_of_a_copy_is_there(recipe: str) -> None:
    files = trees.copied(trees.of_checkout(runner.ROOT), recipe)
    everything = trees.of_checkout(runner.ROOT)
    for path, one in files.items():
        for name in trees._imports(one.content or b"") if path.endswith(".py") else ():
            module = f"{name.replace('.', '/')}.py"
            assert module not in everything or module in files, f"{path} imports {name}"


def test_mutant_that_leaves_out_what_common_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    real = trees.foreign
    monkeypatch.setattr(trees, "foreign", lambda *asked: real(*asked) | {"common/workloads/rates.py"})
    with pytest.raises(AssertionError, match=r"imports common\.workloads\.rates"):
        test_each_import_of_a_copy_is_there("ddp_resnet")


def test_program_that_is_no_python_brings_all() -> None:
    checkout = trees.of_checkout(runner.ROOT) | {"recipes/ddp_gpt/train.py": trees.file(b"def")}
    assert trees.foreign(checkout, "ddp_resnet") == set()


def test_upgrade_keeps_what_cp_has_brought(tmp_path: Path) -> None:
    """A copy that `cp -r` made has workloads of other recipes, which must stay of one version with the rest."""
    by_cp = Path(shutil.copytree(runner.ROOT / "recipes/ddp_resnet", tmp_path / "cp", ignore=compiled))
    for part in ("common", "launch"):
        shutil.copytree(runner.ROOT / part, by_cp / part, ignore=compiled)
    shutil.copy(runner.ROOT / "pyproject.toml", by_cp)
    upgrading.upgrade(runner.ROOT, by_cp, origin=str(runner.ROOT))
    assert (by_cp / "common/workloads/gpt.py").is_file()
    record = records.read(by_cp)
    assert record
    assert "common/workloads/gpt.py" in record.files


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recipes/three", "{tmp}/x"], "recipes/three is not one of the recipes: one, two"),
        (["elsewhere/one", "{tmp}/x"], "elsewhere/one is not one of the recipes"),
        (["{tmp}/new/recipes/one", "{tmp}/x"], "is not of {tmp}/old, the checkout of this tool"),
        (["recipes/one", "{tmp}/mine"], "{tmp}/mine is there already: name a folder that is not, or use --upgrade"),
        (["recipes/one", "{tmp}/mine/train.py"], "is there already"),
        (["--upgrade", "{tmp}/old"], "{tmp}/old is not a copy of a recipe: it has no train.py with a folder common/"),
        (["--upgrade", "{tmp}/nowhere"], "{tmp}/nowhere is not a copy of a recipe"),
        (["--upgrade", "{tmp}/mine", "--from", "no-such"], "--from no-such is neither a folder nor a commit of"),
        (["--upgrade", "{tmp}/mine", "--from", "--all"], "expected one argument"),
        (["--upgrade", "{tmp}/mine", "--from", "{tmp}/mine"], "{tmp}/mine is not a checkout of Brigade"),
        (["--upgrade", "{tmp}/mine", "--recipe", "recipes/three"], "take its successor by --recipe, one of one, two"),
        (["--upgrade", "{tmp}/mine", "recipes/one"], "name a recipe and the folder to create, or --upgrade"),
        (["recipes/one"], "name a recipe and the folder to create, or --upgrade"),
        (["recipes/one", "{tmp}/x", "--dry-run"], "--from, --recipe and --dry-run belong to --upgrade"),
    ],
)
def test_refused(places: Places, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(places.folder)
    capsys.readouterr()
    code = exit_code([word.format(tmp=places.folder) for word in words], places.old)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert said.format(tmp=places.folder) in err
    assert snapshot(places.folder) == before


def exit_code(words: list[str], root: Path) -> int:
    try:
        return main(words, root)
    except SystemExit as end:  # of argparse
        return int(end.code or 0)


def test_copy_into_an_empty_folder_of_a_name_with_spaces(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    (places.folder / "my project").mkdir()
    assert main(["recipes/two", str(places.folder / "my project")], places.old) == 0
    assert (places.folder / "my project/train.py").read_text() == OLD["recipes/two/train.py"]
    assert f"cd '{places.folder}/my project' && bash launch/torchrun.sh ." in capsys.readouterr().out


def test_disk_is_full(places: Places, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of a copy is left."""
    write = copying.write
    monkeypatch.setattr(copying, "write", lambda path, one: full() if path.name == "kept.py" else write(path, one))
    assert main(["recipes/one", str(places.folder / "copy")], places.old) == 2
    assert "No space left" in capsys.readouterr().err
    assert sorted(os.listdir(places.folder)) == ["mine", "new", "old"]


def full() -> None:
    raise OSError(28, os.strerror(28))


# --- A clean upgrade ---------------------------------------------------------------------------------------


def test_clean(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    (places.copy / "notes.txt").write_text("mine alone")
    before = snapshot(places.copy)
    capsys.readouterr()
    assert places.upgrade() == 0
    out = capsys.readouterr().out
    assert f"{places.copy}: one, upgraded from Brigade 0.1.0 to 0.2.0" in out
    for line in (
        "  merged        train.py",
        "  added         common/floor/moved.py, common/part/c.py",
        "  removed       common/changed_and_gone.py, common/gone.py, common/moves.py",
        "  replaced      common/__init__.py, launch/torchrun.sh",
    ):
        assert f"{line}\n" in out
    text = (places.copy / "train.py").read_text()
    assert text == functools.reduce(lambda was, one: was.replace(*one), MINE.items(), NEW["recipes/one/train.py"])
    assert (places.copy / "notes.txt").read_text() == "mine alone"
    assert (places.copy / "launch/torchrun.sh").read_text() == NEW["launch/torchrun.sh"]
    assert os.access(places.copy / "launch/torchrun.sh", os.X_OK)
    assert not os.access(places.copy / "train.py", os.X_OK)

    # What is kept: the record of a fresh copy, and each changed file as it was.
    assert main(["recipes/one", str(places.folder / "fresh")], places.new) == 0
    assert sorted(os.listdir(places.copy / ".brigade")) == ["README.md", "base.tar.gz", "before-1.tar.gz"]
    assert (places.copy / ".brigade/base.tar.gz").read_bytes() == (
        places.folder / "fresh/.brigade/base.tar.gz"
    ).read_bytes()
    subprocess.run(["tar", "-xzf", ".brigade/before-1.tar.gz"], cwd=places.copy, check=True, timeout=runner.HANG_S)
    after = snapshot(places.copy)
    assert {name: after[name] for name in before} == before


def test_twice_is_once(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    assert places.upgrade() == 0
    before = snapshot(places.copy)
    assert places.upgrade() == 0
    assert "nothing to do" in capsys.readouterr().out
    assert snapshot(places.copy) == before


def test_the_users_own_file_of_the_launcher(places: Places) -> None:
    """Is copied, as `cp -r` does, and is neither removed nor replaced."""
    (places.old / "launch/site.sh").write_text("module load mine\n")
    assert main(["recipes/one", str(places.folder / "other")], places.old) == 0
    (places.new / "launch/site.sh").write_text("module load another\n")
    for _ in range(2):
        assert main(["--upgrade", str(places.folder / "other")], places.new) == 0
        assert (places.folder / "other/launch/site.sh").read_text() == "module load mine\n"
        (places.new / "launch/site.sh").unlink(missing_ok=True)


def test_dry_run_writes_nothing(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(places.copy)
    assert places.upgrade("--dry-run") == 0
    said = capsys.readouterr().out
    assert "one, would be upgraded from Brigade 0.1.0 to 0.2.0" in said
    assert snapshot(places.copy) == before
    assert places.upgrade() == 0
    real = capsys.readouterr().out.replace("upgraded", "would be upgraded").splitlines()
    assert [line for line in real if "as it was" not in line] == said.splitlines()[-len(real) + 1 :]


def test_files_that_only_the_user_has_changed_stay(places: Places) -> None:
    (places.copy / "common/kept.py").write_text("kept = 'mine'\n")
    (places.copy / "common/kept.py").chmod(0o700)
    assert places.upgrade() == 0
    assert (places.copy / "common/kept.py").read_text() == "kept = 'mine'\n"
    assert (places.copy / "common/kept.py").stat().st_mode & 0o777 == 0o700


def test_mode_is_the_users(places: Places) -> None:
    """Who may read a file stays; who may run it is upstream's choice, unless the user has made another."""
    (places.copy / "train.py").chmod(0o755)
    (places.copy / "common/__init__.py").chmod(0o600)
    (places.new / "common/__init__.py").chmod(0o755)
    (places.new / "common/kept.py").chmod(0o755)
    assert places.upgrade() == 0
    modes = {name: (places.copy / name).stat().st_mode & 0o700 for name in ("train.py", "common/kept.py")}
    assert modes == {"train.py": 0o700, "common/kept.py": 0o700}
    assert (places.copy / "common/__init__.py").stat().st_mode & 0o066 == 0


# --- Conflicts ---------------------------------------------------------------------------------------------


def test_conflict(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    edit(places.copy / "train.py", {"line 50\n": "my line 50\n"})
    assert places.upgrade() == 1
    out = capsys.readouterr().out
    text = (places.copy / "train.py").read_text()
    shown = "<<<<<<< yours\nmy line 50\n=======\nline fifty\n>>>>>>> Brigade 0.2.0\n"
    assert shown in text
    line = text[: text.index(shown)].count("\n") + 1
    assert f"  conflict      train.py:{line}\n" in out
    assert "conflicts: 1. In each, keep what you need" in out

    before = snapshot(places.copy)  # until it is resolved, nothing else is merged
    assert places.upgrade() == 2
    assert f"train.py:{line} still has the conflict of an earlier upgrade" in capsys.readouterr().err
    assert snapshot(places.copy) == before
    (places.copy / "train.py").write_text(text.replace(shown, "my line fifty\n"))
    assert places.upgrade() == 0
    assert "my line fifty\n" in (places.copy / "train.py").read_text()


def test_whoever_configured_git(places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Markers are the same under another style of conflicts."""
    (tmp_path / "config").write_text("[merge]\n\tconflictStyle = diff3\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    edit(places.copy / "train.py", {"line 50\n": "my line 50\n"})
    assert places.upgrade() == 1
    assert "|||||||" not in (places.copy / "train.py").read_text()


def test_without_git(places: Places, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(places.folder))
    before = snapshot(places.copy)
    assert places.upgrade() == 2
    assert "git is not installed, and an upgrade merges with it" in capsys.readouterr().err
    assert snapshot(places.copy) == before


def test_both_have_added_a_file(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    (places.copy / "common/part/c.py").write_text("c = 'mine'\n")
    assert places.upgrade() == 1
    assert "conflict      common/part/c.py:1\n" in capsys.readouterr().out
    text = (places.copy / "common/part/c.py").read_text()
    assert text == "<<<<<<< yours\nc = 'mine'\n=======\nc = 1\n>>>>>>> Brigade 0.2.0\n"


def test_both_have_changed_what_is_not_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = Places(tmp_path, **{"common/weights.bin": "\0two"})
    (places.copy / "common/weights.bin").write_text("\0mine")
    assert places.upgrade() == 1
    assert (
        "conflict      common/weights.bin   (both sides have changed it, and it is not text" in capsys.readouterr().out
    )
    assert (places.copy / "common/weights.bin").read_text() == "\0mine"


def test_new_weights_take_the_place_of_the_old(tmp_path: Path) -> None:
    """The record has no content of what is not text, and needs none."""
    places = Places(tmp_path, **{"common/weights.bin": "\0two"})
    assert places.upgrade() == 0
    assert (places.copy / "common/weights.bin").read_text() == "\0two"


# --- Files that go -----------------------------------------------------------------------------------------


def test_deletions_of_both_sides(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    (places.copy / "common/kept.py").unlink()
    shutil.rmtree(places.copy / "launch")
    (places.copy / "common/changed_and_gone.py").write_text("gone = 'mine'\n")
    assert places.upgrade() == 0
    out = capsys.readouterr().out
    assert "  stays deleted common/kept.py\n" in out
    assert "  stays deleted launch/   (1 files)\n" in out
    assert "  kept          common/changed_and_gone.py   (upstream deleted it, and you have changed it)\n" in out
    assert not (places.copy / "common/kept.py").exists()
    assert not (places.copy / "launch").exists()
    assert not (places.copy / "common/gone.py").exists()
    assert (places.copy / "common/changed_and_gone.py").read_text() == "gone = 'mine'\n"
    assert places.upgrade() == 0, "and the next time as well"
    assert not (places.copy / "common/kept.py").exists()


def test_new_file_in_a_folder_that_the_user_has_deleted(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    """A floor that was deleted does not come back by one file."""
    shutil.rmtree(places.copy / "common/part")
    assert places.upgrade() == 0
    assert "  left out      common/part/c.py   (it is new, and you have deleted common/part)" in capsys.readouterr().out
    assert not (places.copy / "common/part").exists()


def test_changes_follow_a_file_that_upstream_has_moved(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    edit(places.copy / "common/moves.py", {"move 40\n": "my move 40\n"})
    assert places.upgrade() == 0
    said = "common/floor/moved.py   (was common/moves.py; upstream moved it, and your changes came along)\n"
    assert f"  merged        {said}" in capsys.readouterr().out
    wanted = NEW["common/floor/moved.py"].replace("move 40\n", "my move 40\n")
    assert (places.copy / "common/floor/moved.py").read_text() == wanted
    assert not (places.copy / "common/moves.py").exists()


def test_folder_that_has_nothing_left_goes(places: Places) -> None:
    for path in ("a.py", "b.py", "c.py"):
        (places.new / "common/part" / path).unlink()
    assert places.upgrade() == 0
    assert not (places.copy / "common/part").exists()
    assert (places.copy / "launch").exists()


# --- Copies without a record -------------------------------------------------------------------------------


def test_copy_that_cp_made(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    """Is upgraded from an old checkout, and has a record then."""
    shutil.rmtree(places.copy / ".brigade")
    assert places.upgrade() == 2
    assert (
        "has no record of its origin (.brigade/base.tar.gz): give --from an older checkout" in capsys.readouterr().err
    )
    assert places.upgrade("--from", str(places.old)) == 0
    assert "one, upgraded from Brigade 0.1.0 to 0.2.0" in capsys.readouterr().out
    assert "line fifty\n" in (places.copy / "train.py").read_text()
    assert places.upgrade() == 0


def test_copy_of_a_commit(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    """The new checkout's repository has the old one in its history."""
    shutil.rmtree(places.copy / ".brigade")
    with_git = places.folder / "repository"
    checkout(with_git, OLD)
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "old"], ["tag", "old"]):
        names = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        subprocess.run(["git", *names, *words], cwd=with_git, check=True, timeout=runner.HANG_S)
    shutil.copytree(places.new, with_git, dirs_exist_ok=True)
    for path in OLD.keys() - NEW.keys():
        (with_git / path).unlink()
    assert main(["--upgrade", str(places.copy), "--from", "old"], with_git) == 0
    assert "one, upgraded from Brigade 0.1.0 to 0.2.0" in capsys.readouterr().out
    assert not (places.copy / "common/gone.py").exists()


def test_recipe_that_has_another_name_now(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    (places.new / "recipes/one").rename(places.new / "recipes/uno")
    assert places.upgrade() == 2
    assert "has no recipes/one: take its successor by --recipe, one of two, uno" in capsys.readouterr().err
    assert places.upgrade("--recipe", "recipes/uno") == 0
    assert "one, now uno, upgraded" in capsys.readouterr().out
    assert "line fifty\n" in (places.copy / "train.py").read_text()


def test_each_recipe_is_known_by_its_train_py(tmp_path: Path) -> None:
    """Also after an edit, of which a copy without a record has some."""
    real = trees.of_checkout(runner.ROOT)
    for recipe in runner.RECIPES:
        text = runner.source(recipe).replace("import torch\n", "import torch\nimport mine\n")
        (tmp_path / "train.py").write_text(text.replace("seed", "my_seed"))
        assert upgrading._most_like(real, tmp_path) == recipe


# --- No line is lost ---------------------------------------------------------------------------------------


def random_edit(draw: random.Random, text: str, who: str, number: Iterator[int]) -> str:
    """Some lines deleted, changed, added and moved; each new one is unlike any other."""
    lines = text.splitlines(keepends=True)
    for _ in range(draw.randint(1, 6)):
        at, size = draw.randrange(len(lines)), draw.randint(0, 3)
        fresh = [f"{who} {next(number)}\n" for _ in range(draw.randint(0, 3))]
        lines[at : at + size] = fresh
        lines = lines or ["last\n"]
    if draw.random() < 0.3:
        lines[-1] = lines[-1].removesuffix("\n")
    return "".join(lines)


def merge_at_random(seed: int) -> None:
    """Merge random edits of both sides, and look for each line by itself."""
    draw, number = random.Random(seed), itertools.count()
    old = "".join(f"line {draw.randint(1, 9)}\n" for _ in range(draw.randint(1, 30)))
    mine, theirs = (random_edit(draw, old, who, number) for who in ("mine", "theirs"))
    base, now, new = ({"a": trees.file(text.encode())} for text in (old, mine, theirs))
    changes = merging.plan(base, now, new, "2")
    result = {"a": now["a"]} | {change.path: change.after for change in changes if change.after}
    after = Counter((result["a"].content or b"").decode().splitlines())
    for who, text in (("mine", mine), ("theirs", theirs)):
        lost = Counter(line for line in text.splitlines() if line.startswith(who)) - after
        assert not lost, (seed, who, lost)


def test_no_line_is_lost() -> None:
    for seed in range(40):
        merge_at_random(seed)


def takes_upstreams_side(old: bytes, yours: bytes, new: bytes, version: str) -> tuple[bytes, tuple[int, ...]]:
    return new, ()


def test_merge_that_takes_upstreams_side(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: the tool itself refuses it, and if it did not, the test above would fail."""
    monkeypatch.setattr(merging, "merge_text", takes_upstreams_side)
    before = snapshot(places.copy)
    assert places.upgrade() == 2
    assert snapshot(places.copy) == before
    with pytest.raises(merging.UserError, match="the merge would lose your line"):
        test_no_line_is_lost()
    monkeypatch.setattr(merging, "Counter", lambda lines: Counter())
    with pytest.raises(AssertionError, match="mine"):
        test_no_line_is_lost()


# --- An upgrade that ends in the middle --------------------------------------------------------------------


class KilledError(BaseException):
    """In place of SIGKILL: nothing handles it."""


def at_operation(monkeypatch: pytest.MonkeyPatch, number: int, error: Callable[[], BaseException]) -> Iterator[int]:
    """Let what changes the disk fail at its n-th operation; afterwards gives how many there were."""
    count = itertools.count()

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def operation(*args: object, **kwargs: object) -> object:
            if next(count) == number:
                raise error()
            return real(*args, **kwargs)

        return operation

    with monkeypatch.context() as patched:
        for name in ("rename", "replace", "unlink"):
            patched.setattr(Path, name, counted(getattr(Path, name)))
        patched.setattr(copying, "write", counted(copying.write))
        yield 0
    yield next(count)


def prepared(folder: Path) -> Places:
    """With all kinds of changes, one of them a conflict."""
    places = Places(folder)
    edit(places.copy / "train.py", {"line 50\n": "my line 50\n"})
    edit(places.copy / "common/moves.py", {"move 40\n": "my move 40\n"})
    (places.copy / "common/kept.py").unlink()
    shutil.copytree(places.copy, folder / "as it was")
    return places


def again(places: Places) -> Places:
    """With the copy as it was prepared."""
    shutil.rmtree(places.copy)
    shutil.copytree(places.folder / "as it was", places.copy)
    return places


def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edits: bool = False) -> int:
    """Kill an upgrade before each of its operations, and run it again; returns the number of operations."""
    places = prepared(tmp_path)
    before = snapshot(places.copy)
    assert places.upgrade() == 1
    wanted = snapshot(places.copy, backups=False)
    for number in itertools.count():
        again(places)
        operations = at_operation(monkeypatch, number, KilledError)
        next(operations)
        try:
            places.upgrade()
        except KilledError:
            ended = True
        else:
            ended = False
        next(operations)
        middle = snapshot(places.copy)
        if edits:  # by the user, who has not seen that the upgrade did not end
            (places.copy / "common/part/a.py").write_text("a = 'mine'\n")
        done = places.upgrade()
        if not ended:
            return number
        committed = middle[".brigade/base.tar.gz"] == wanted[".brigade/base.tar.gz"]
        assert done == (2 if committed else 1)  # a conflict is left to the user in either case
        after = snapshot(places.copy, backups=False)
        assert after == wanted | ({"common/part/a.py": (b"a = 'mine'\n", 0o100644)} if edits else {}), number
        (kept,) = (places.copy / ".brigade").glob("before-*")
        with tarfile.open(kept) as tar:
            names = {one.name for one in tar}
            assert names < before.keys()
            for name in names:
                member = tar.extractfile(name)
                assert member
                assert member.read() == before[name][0]
    raise AssertionError


def test_killed_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert interrupted(tmp_path, monkeypatch) > 25


def test_killed_and_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert interrupted(tmp_path, monkeypatch, edits=True) > 25


def test_killed_and_nothing_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant."""
    monkeypatch.setattr(upgrading, "_recover", lambda folder, dry_run: [])
    with pytest.raises((AssertionError, OSError)):
        interrupted(tmp_path, monkeypatch)


def test_disk_is_full_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the copy is as it was, at once."""
    places = prepared(tmp_path)
    before = snapshot(places.copy)
    for number in itertools.count():
        again(places)
        operations = at_operation(monkeypatch, number, lambda: OSError(28, os.strerror(28)))
        next(operations)
        code = places.upgrade()
        next(operations)
        if code == 1:
            break
        assert code == 2
        after = snapshot(places.copy, backups=False)
        if after[".brigade/base.tar.gz"] == before[".brigade/base.tar.gz"]:
            assert {name: one for name, one in after.items() if not name.startswith(".brigade/up")} == before
    assert number > 25


def test_dry_run_of_what_was_interrupted(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    (places.copy / ".brigade/upgrade").mkdir()
    before = snapshot(places.copy)
    assert places.upgrade("--dry-run") == 2
    assert "was interrupted: without --dry-run, it is put right first" in capsys.readouterr().err
    assert snapshot(places.copy) == before


def test_edited_in_the_middle(
    places: Places, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By an editor that saves while the upgrade writes: what it has saved stays, and all else is as it was."""
    sync, before = Path.rename, snapshot(places.copy)

    def rename(path: Path, target: Path) -> Path:
        (places.copy / "train.py").write_text("saved just now\n")
        return sync(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        assert places.upgrade() == 2
    assert f"{places.copy}/train.py was edited while the upgrade ran: run it again" in capsys.readouterr().err
    assert snapshot(places.copy) == before | {"train.py": (b"saved just now\n", before["train.py"][1])}


def test_two_at_once(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    with upgrading._alone(places.copy):
        assert places.upgrade() == 2
    assert f"another upgrade of {places.copy} is running" in capsys.readouterr().err
    assert places.upgrade() == 0


# --- The recipes -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This checkout as it may be one day: with another version, a new module, and other lines in each recipe."""
    root = tmp_path_factory.mktemp("newer")
    for part in ("recipes", "common", "launch"):
        shutil.copytree(runner.ROOT / part, root / part, ignore=compiled)
    shutil.copy(runner.ROOT / "pyproject.toml", root)
    edit(root / "common/__init__.py", {'__version__ = "': '__version__ = "99.'})
    (root / "common/run/newer.py").write_text('"""New."""\n')
    for recipe in runner.RECIPES:
        path = root / "recipes" / recipe / "train.py"
        changes = {"\nBase: ": "\nUpstream says more.\n\nBase: "}
        changes |= {"\n# --- 4 Step": "\nUPSTREAM = 4\n\n\n# --- 4 Step"}
        edit(path, changes | {"\n\nif __name__": "\n\nUPSTREAM += 1\n\nif __name__"})
    return root


def adapt(path: Path) -> list[str]:
    """Edit sections 1 and 2 of a train.py as its owner would; returns the lines."""
    text = path.read_text()
    starts = [text.index(f"\n# --- {number} ") for number in (1, 2, 3)]
    one, two = (text[start:end] for start, end in itertools.pairwise(starts))
    flag = "    my_flag: int = 7  # mine\n"
    ours = 'print(f"my own {Args().my_flag}")\n'
    assert "\n    # run\n" in one
    one = one.replace("\n    # run\n", f"\n{flag}    # run\n", 1)
    path.write_text(text[: starts[0]] + one + two.rstrip("\n") + f"\n\n\n{ours}\n" + text[starts[2] :])
    return [flag, ours]


@pytest.mark.parametrize("recipe", runner.RECIPES)
def test_trains_after(recipe: str, newer: Path, small_data: dict[str, Path], tmp_path: Path) -> None:
    """A copy of this version, with edits of its sections 1 and 2, after an upgrade to a newer one."""
    copy = tmp_path / "copy"
    assert main([f"recipes/{recipe}", str(copy)], runner.ROOT) == 0
    lines = adapt(copy / "train.py")
    assert main(["--upgrade", str(copy)], newer) == 0
    text = (copy / "train.py").read_text()
    assert all(line in text for line in [*lines, "UPSTREAM = 4\n", "UPSTREAM += 1\n"])
    assert (copy / "common/run/newer.py").exists()
    layout = runner.layout(recipe, 1).flags  # of one process
    flags = ["--max-steps", "2", *runner.small(recipe), *layout, "--out", "runs", "--name", "one"]
    if recipe in runner.SUPERVISED:
        flags += ["--data", str(small_data[runner.workload(recipe)])]
    flags = [one if one != "resnet6" else "resnet18" for one in flags]  # which only the tests' ranks have
    done = subprocess.run(
        [sys.executable, "train.py", *flags],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=runner.HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "my own 7" in done.stdout
    assert "done     step 2 of 2" in done.stdout
    versions = json.loads((copy / "runs/one/config.json").read_text())["versions"]
    assert versions["brigade"] == f"99.{common.__version__}"


# --- Records of strangers ----------------------------------------------------------------------------------


def record(files: Mapping[str, bytes], entries: Mapping[str, object] | None = None, **facts: object) -> bytes:
    """An archive as a stranger may have written it."""
    known = {name: {"sha256": trees.file(content).digest, "executable": False} for name, content in files.items()}
    text = {"format": 1, "brigade": "0.1.0", "recipe": "one", "files": known | dict(entries or {}), **facts}
    return records.archive({name: trees.file(content) for name, content in files.items()} | manifest(json.dumps(text)))


def manifest(text: str) -> dict[str, trees.File]:
    return {records.MANIFEST: trees.file(text.encode())}


def with_link() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        link = tarfile.TarInfo(records.MANIFEST)
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return packed.getvalue()


def bomb(member_bytes: int) -> bytes:
    """A header that promises more than there is, or zeros that compress well."""
    head = tarfile.TarInfo("train.py")
    head.size = member_bytes
    return gzip.compress(head.tobuf() + bytes(min(member_bytes, trees.MOST_BYTES + 2**20)))


HOSTILE: dict[str, Callable[[], bytes]] = {
    "absolute": lambda: record({"/etc/passwd": b"x"}),
    "above": lambda: record({"common/../../x.py": b"x"}),
    "above, in the list alone": lambda: record({}, {"../x.py": {"sha256": "0", "executable": False}}),
    "of git": lambda: record({".git/config": b"x"}),
    "hidden below": lambda: record({"common/.brigade/x": b"x"}),
    "with a control character": lambda: record({"common/a\x1b[2J.py": b"x"}),
    "not in the list": lambda: records.archive({"a.py": trees.file(b"x")} | manifest('{"format": 1, "files": {}}')),
    "another content": lambda: record({"a.py": b"x"}, {"a.py": {"sha256": "0", "executable": False}}),
    "a link": with_link,
    "large member": lambda: bomb(2**40),
    "zeros": lambda: bomb(trees.MOST_BYTES + 2**20),
    "many": lambda: record({f"f{number}": b"" for number in range(trees.MOST_FILES + 2)}),
    "deep": lambda: records.archive(manifest("[" * 100_000)),
    "a list": lambda: records.archive(manifest("[]")),
    "entries that are none": lambda: record({}, {"a.py": 7}),
    "another format": lambda: record({}, format=9),
    "no manifest": lambda: records.archive({"a.py": trees.file(b"x")}),
    "cut off": lambda: record({"a.py": b"x" * 10_000})[:-30],
    "not gzip": lambda: b"hello",
    "empty": lambda: b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_record(
    places: Places, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is refused in a sentence that says how to do without it, and nothing is written anywhere."""
    monkeypatch.setattr(trees, "MOST_BYTES", 2**20)
    monkeypatch.setattr(trees, "MOST_FILES", 50)
    (places.copy / ".brigade/base.tar.gz").write_bytes(HOSTILE[name]())
    before = snapshot(places.folder)
    capsys.readouterr()
    assert places.upgrade() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {places.copy}/.brigade/base.tar.gz cannot be used: it ")
    assert "--from CHECKOUT upgrades without it" in err
    assert err.count("\n") == 1
    assert "\x1b" not in err
    assert snapshot(places.folder) == before
    assert places.upgrade("--from", str(places.old)) == 0


def test_records_of_strangers_can_be_right(places: Places) -> None:
    """The test's own archive is refused for what is wrong in it, and for nothing else."""
    files = {path: one.content or b"" for path, one in trees.copied(trees.of_checkout(places.old), "one").items()}
    (places.copy / ".brigade/base.tar.gz").write_bytes(record(files))
    assert places.upgrade() == 0


@pytest.mark.parametrize("link", [".brigade", ".brigade/base.tar.gz", "common", "common/kept.py", "train.py"])
def test_links_in_a_copy(places: Places, link: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is written behind a link would change something that is not the copy."""
    (places.copy / link).rename(places.folder / "elsewhere")
    (places.copy / link).symlink_to(places.folder / "elsewhere")
    before = snapshot(places.folder)
    assert places.upgrade() == 2
    assert f"{places.copy / link} is a link" in capsys.readouterr().err
    assert snapshot(places.folder) == before


def test_journal_of_a_stranger(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an upgrade that never was, and would delete a file elsewhere."""
    (places.folder / "x.py").write_text("x")
    journal = places.copy / ".brigade/upgrade"
    journal.mkdir()
    (journal / "plan.json").write_text(json.dumps({"../x.py": ["", trees.file(b"x").digest]}))
    (journal / "base.tar.gz").write_bytes(b"")
    assert places.upgrade() == 2
    assert "names '../x.py', which no copy has" in capsys.readouterr().err
    for text in ("[]", '{"a": 1}', "{", "[" * 100_000):
        (journal / "plan.json").write_text(text)
        assert places.upgrade() == 2
        assert "plan.json is damaged: compare the files with those in" in capsys.readouterr().err
    assert (places.folder / "x.py").read_text() == "x"
