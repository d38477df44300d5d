"""tools.lesson: the diff of two files by section, without docstrings, for a terminal and for a browser."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from common import UserError
from tools.about import ROOT
from tools.lesson import diff, show

from tests.harness import runner

BEFORE = '''"""A file.

Of two lines.
"""

import os

X = 1


def same() -> None:
    """Say nothing."""
    os.getpid()


def gone() -> int:
    return 0


def steps(n: int) -> int:
    """Count."""

    # Why.
    return n
'''
AFTER = (
    BEFORE.replace("return n\n", "return n + 1  # < & >\n")
    .replace("Say nothing", "Be silent")
    .replace("def gone() -> int:\n    return 0\n\n\n", "class New:\n    y = 2\n\n\n")
)


@pytest.fixture
def lesson(tmp_path: Path) -> diff.Lesson:
    """Of two small files."""
    for name, text in (("one.py", BEFORE), ("two.py", AFTER)):
        (tmp_path / name).write_text(text)
    return diff.lesson(str(tmp_path / "one.py"), str(tmp_path / "two.py"), "bare.py")


def test_sections(lesson: diff.Lesson) -> None:
    assert [section.name for section in lesson.changed] == ["gone", "New", "steps"]
    assert lesson.same == ["imports and constants", "same"], "docstrings do not count"
    (steps,) = [section for section in lesson.changed if section.name == "steps"]
    assert steps.lines(0) == ["-    return n", "+    return n + 1  # < & >"]
    assert steps.lines(3) == [" def steps(n: int) -> int:", "     # Why.", *steps.lines(0)]
    assert lesson.count() == "6 changed lines: 3 removed, 3 added, in 3 of 5 sections"


def test_call_of_main_belongs_to_it(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text(BEFORE + '\n\nif __name__ == "__main__":\n    steps(1)\n')
    found = diff.sections(path)
    assert found[diff.TOP] == ["import os", "", "X = 1"]
    assert found["main"] == ['if __name__ == "__main__":', "    steps(1)"]


def test_text_has_colours_where_they_are_asked_for(lesson: diff.Lesson) -> None:
    plain = show.text(lesson, 0, colours=False)
    assert "\033" not in plain
    assert "== steps ==\n-    return n\n+    return n + 1" in plain
    assert plain.endswith("the same in both: imports and constants, same")
    painted = show.text(lesson, 0, colours=True)
    assert "\033[31m-    return n\033[0m" in painted
    assert re.sub(r"\033\[\d+m", "", painted) == plain


@pytest.mark.parametrize("name", ["NO_COLOR", "TERM"])
def test_no_colours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert show.has_colours()
    monkeypatch.setenv(name, "dumb")
    assert not show.has_colours()


def test_page(lesson: diff.Lesson) -> None:
    """It says what the text says, escapes what HTML reads, and asks nobody for anything."""
    page = show.page(lesson, 3)
    assert "return n + 1  # &lt; &amp; &gt;" in page
    assert not re.search(r"https?:|src=|href=|@import|url\(", page)
    assert "prefers-color-scheme: dark" in page
    assert "width=device-width" in page
    assert lesson.count() in page


def test_sections_of_a_recipe_are_its_banners() -> None:
    found = diff.lesson("ddp_resnet", "multinode_resnet", "train.py")
    assert [section.name for section in found.changed] == ["imports and constants", "1 Arguments", "3 Strategy"]
    assert found.same == ["2 Workload", "4 Step", "5 Main"]


@pytest.mark.parametrize("recipe", sorted(path.parent.name for path in ROOT.glob("recipes/*/bare.py")))
def test_all_lines_of_code_of_a_twin_are_in_a_section(recipe: str) -> None:
    """And nothing else: none is lost, and no docstring is left."""
    path = ROOT / "recipes" / recipe / "bare.py"
    found = [line for lines in diff.sections(path).values() for line in lines if line.strip()]
    assert '"""' not in "".join(found)
    assert len(found) > 50
    text = re.sub(r'^ *""".*?"""$', "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert sorted(found) == sorted(line for line in text.splitlines() if line.strip())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ddp_resnet", "nowhere"], "nowhere is neither a file nor a recipe with a bare.py"),
        (["ddp_resnet", "recipes/ddp_resnet"], "are the same file"),
        (["cellfree_mimo", "ddp_gpt"], "cellfree_mimo is neither a file nor a recipe"),
        (["README.md", "ddp_gpt"], "README.md is not a Python file"),
    ],
)
def test_refusals(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=re.escape(said)):
        diff.lesson(*words, "bare.py")


def test_command(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    command = [sys.executable, "-m", "tools.lesson", "dp_resnet", "ddp_resnet"]
    said = [
        subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, timeout=runner.HANG_S, check=True)
        for more in ((), ("--html", str(page)))
    ]
    assert "\n== parallelize ==\n" in said[0].stdout
    assert "\033" not in said[0].stdout
    assert "changed lines" in said[1].stdout
    assert page.read_text().startswith("<!DOCTYPE html>")
