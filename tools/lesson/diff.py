"""Two files as sections without docstrings, and what changes between them."""

import ast
import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from common import UserError
from tools.about import ROOT

BANNER = re.compile(r"^# --- (.*?) -+$", re.MULTILINE)
TOP = "imports and constants"
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Section:
    """A part of a file under one name, before and after.

    Attributes:
        name: of a function or a class, or a banner's text.
        before: its lines; none where it is new.
        after: its lines; none where it is gone.
    """

    name: str
    before: list[str]
    after: list[str]

    @property
    def removed(self) -> int:
        """Lines that are there before only."""
        return sum(line[0] == "-" for line in self.lines(0))

    @property
    def added(self) -> int:
        """Lines that are there after only."""
        return sum(line[0] == "+" for line in self.lines(0))

    def lines(self, context: int) -> list[str]:
        """The diff, with this many unchanged lines around each change: "-old", "+new", " same", "@@" between parts."""
        found = [*difflib.unified_diff(self.before, self.after, n=context, lineterm="")][2:]
        found = ["@@" if line.startswith("@@") else line for line in found]
        return found[1:]  # there is no part before the first one


@dataclass(frozen=True)
class Lesson:
    """What changes from one file to another.

    Attributes:
        before: name of the first file, from the repository's root if it lies there.
        after: of the second.
        sections: all of both files.
    """

    before: str
    after: str
    sections: list[Section]

    @property
    def changed(self) -> list[Section]:
        """The sections that differ."""
        return [section for section in self.sections if section.before != section.after]

    @property
    def same(self) -> list[str]:
        """Names of the others."""
        return [section.name for section in self.sections if section.before == section.after]

    def count(self) -> str:
        """The changed lines, in words."""
        removed, added = (sum(getattr(one, kind) for one in self.changed) for kind in ("removed", "added"))
        where = f"in {len(self.changed)} of {len(self.sections)} sections"
        return f"{removed + added} changed lines: {removed} removed, {added} added, {where}"


def lesson(before: str, after: str, file: str) -> Lesson:
    """Compare two recipes or files.

    Args:
        before: a recipe's name or folder, or a Python file.
        after: another one.
        file: of a recipe, the one to compare.

    Raises:
        UserError: there is no such recipe or file, or it is not Python.
    """
    paths = [find(name, file) for name in (before, after)]
    if paths[0] == paths[1]:
        raise UserError(f"{before} and {after} are the same file: give two recipes, such as ddp_resnet and fsdp_gpt")
    one, other = (sections(path) for path in paths)
    names = [path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path) for path in paths]
    found = [Section(name, one.get(name, []), other.get(name, [])) for name in joined(one, other)]
    return Lesson(names[0], names[1], found)


def find(name: str, file: str) -> Path:
    """The file that a word of the command line means."""
    path = Path(name)
    for found in (path, path / file, ROOT / "recipes" / name / file):
        if found.is_file():
            return found.resolve()
    known = sorted(one.parent.name for one in ROOT.glob(f"recipes/*/{file}"))
    raise UserError(f"{name} is neither a file nor a recipe with a {file}: use {', '.join(known)}")


def joined(one: dict[str, list[str]], other: dict[str, list[str]]) -> list[str]:
    """Names of both in the second one's order; one that is gone stands behind what it followed."""
    found = [*other]
    last = ""
    for name in one:
        if name not in other:
            found.insert(found.index(last) + 1 if last in found else 0, name)
        last = name
    return found


def sections(path: Path) -> dict[str, list[str]]:
    """The lines of each section of a file: of each banner, or else of each function and class.

    Raises:
        UserError: it is not Python.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path} is not a Python file: {error}") from None
    lines: list[str | None] = [*text.splitlines()]
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            for number in range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1):
                lines[number - 1] = None
    starts = banners(text) or functions(tree)
    found: dict[str, list[str | None]] = {}
    for number, line in enumerate(lines, 1):
        name = next(name for first, last, name in reversed([(0, len(lines), TOP), *starts]) if first <= number <= last)
        if not (line is not None and BANNER.fullmatch(line)):
            found.setdefault(name, []).append(line)
    return {name: tidy(some) for name, some in found.items() if tidy(some)}


def banners(text: str) -> list[tuple[int, int, str]]:
    """First line, last line and name of each section under a banner; those of train.py begin with a number."""
    lines = text.splitlines()
    heads = [(number, match[1]) for number, line in enumerate(lines, 1) if (match := BANNER.fullmatch(line))]
    ends = [*(number - 1 for number, _ in heads[1:]), len(lines)]  # of each, before the next one or at the file's end
    return [(first, last, name) for (first, name), last in zip(heads, ends, strict=False)]


def functions(tree: ast.Module) -> list[tuple[int, int, str]]:
    """First line, last line and name of each function and class; what calls main is a part of it."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            found.append((first, node.end_lineno or first, node.name))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            found.append((node.lineno - 1, node.end_lineno or node.lineno, "main"))  # with an empty line above
    return found


def tidy(lines: list[str | None]) -> list[str]:
    """Without docstrings, and without empty lines at the ends, in a row, and behind a docstring."""
    found: list[str] = []
    after_docstring = False
    for line in lines:
        if line is None:
            after_docstring = True
        elif line.strip():
            found.append(line)
            after_docstring = False
        elif found and found[-1] and not after_docstring:
            found.append("")
    while found and not found[-1]:
        found.pop()
    return found
