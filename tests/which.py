"""Which tests a change is for, by imports and by the names of folders: `python -m tests.which [FILES...]`.

Without files: those that differ from git's HEAD, or from where the branch left --since. A test is for a file if it
lies in the folder of the same name, imports the file, or names it. What only reaches it through other modules is left
to `uv run pytest`. --table writes the table in CONTRIBUTING.md.
"""

import argparse
import ast
import functools
import shlex
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from tools.about import ROOT

from tests import floors
from tests.harness import pages

PAGE = ROOT / "CONTRIBUTING.md"
PARTS = ("common", "launch", "tools", "tests", "benchmarks")  # whose modules tests import, or could
# They read the whole tree.
ALWAYS = ("tests/test_floors.py", "tests/test_house.py", "tests/test_mutation.py", "tests/docs/test_words.py")
ALL = ("tests",)
OF_ALL = ("pyproject.toml", "uv.lock", ".ci/", "tests/conftest.py", "tests/__init__.py", "tests/harness/runner.py")
# The folder of tests for a folder of sources, where its name does not tell.
OWN = {
    "common/protect/": ("tests/protect", "tests/faults"),
    "launch/": ("tests/launch",),
    "docs/": ("tests/docs",),
    "benchmarks/": ("tests/docs/test_pages.py",),
}
ROWS = (  # of the table
    "common/session.py",
    *(f"common/{floor}/" for floor in ("protect", "measure", "track", "state", "store", "run", "train", "workloads")),
    "common/*.py",
    *("recipes/", "launch/", "tools/", "benchmarks/", "docs/", "tests/*.py", "tests/harness/", "pyproject.toml, .ci/"),
)


def sources(under: str = "") -> list[str]:
    """Files of the repository, from its root, as far as git knows them or does not ignore them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *([under] if under else [])]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted(name for name in {*listed} if (ROOT / name).is_file())


@functools.cache
def text(name: str) -> str:
    """Of a file."""
    return (ROOT / name).read_text()


def is_test(name: str) -> bool:
    """Whether pytest finds tests in it."""
    return name.startswith("tests/") and Path(name).name.startswith("test_") and name.endswith(".py")


@functools.cache
def modules() -> Mapping[str, str]:
    """File of each module; a package is its __init__.py."""
    found = {}
    for name in (name for part in PARTS for name in sources(part) if name.endswith(".py")):
        found[".".join(Path(name).with_suffix("").parts).removesuffix(".__init__")] = name
    return found


@functools.cache
def imported(name: str) -> frozenset[str]:
    """Files of the modules that a file imports, by itself or, of tests/, through what it imports there."""
    known = modules()
    found = set()
    for node in floors.import_nodes(text(name)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for one in names:
            module = one if one in known else one.rpartition(".")[0]  # what is no module is a name in one
            found |= {known[module]} if module in known else set()
    return frozenset(found)


@functools.cache
def through_tests(name: str) -> frozenset[str]:
    """Files of tests/ that a file imports, and what those import there."""
    found: set[str] = set()
    open_ones = [name]
    while open_ones:
        new = {one for one in imported(open_ones.pop()) if one.startswith("tests/")} - found
        found |= new
        open_ones += new
    return frozenset(found)


@functools.cache
def tests() -> tuple[str, ...]:
    """All files with tests."""
    return tuple(name for name in sources("tests") if is_test(name))


def of_file(name: str) -> set[str]:
    """The tests for a file: files and folders; for a recipe, its folder of tests, see `commands`."""
    if is_test(name):
        return {name}
    if name.startswith(OF_ALL):
        return {*ALL}
    path = Path(name)
    found = {*ALWAYS}
    found |= {one for one in tests() if name in imported(one) or name in through_tests(one)}
    found |= {one for folder, own in OWN.items() if name.startswith(folder) for one in own}
    if path.suffix == ".md":
        found.add("tests/docs")
    if path.suffix not in ("", ".py"):  # what a test reads instead of importing it
        found |= {one for one in tests() if path.name in text(one)}
    if name.startswith("recipes/"):
        found.add("tests/recipes")
    if name.startswith(("common/", "tests/")) and (ROOT / "tests" / path.parts[1]).is_dir() and len(path.parts) > 2:
        found |= {f"tests/{path.parts[1]}"} if path.parts[1] != "harness" else set()
    if name.startswith("tools/") and len(path.parts) > 2:
        found |= {one for one in tests() if one.startswith(f"tests/tools/test_{path.parts[1]}")}
    return found


def collapse(names: Iterable[str]) -> list[str]:
    """Without what lies in a folder that is there as well, or of which all files are there."""
    found = {*names}
    for folder in {str(Path(one).parent) for one in tests()} - {"tests"}:
        if {one for one in tests() if one.startswith(f"{folder}/")} <= found:
            found.add(folder)
    return sorted(one for one in found if not any(str(parent) in found for parent in Path(one).parents))


def commands(names: Iterable[str]) -> list[str]:
    """What to run for changed files: of the tests of all recipes, those of the changed ones."""
    found: set[str] = set()
    recipes = set()
    for name in names:
        own = of_file(name)
        parts = Path(name).parts
        if parts[0] == "recipes" and len(parts) > 2:
            recipes.add(parts[1])
            own.discard("tests/recipes")
        found |= own
    paths = collapse(found)
    lines = [shlex.join(["uv", "run", "pytest", *paths])] if paths else []
    if recipes and not {"tests", "tests/recipes"} & {*paths}:
        lines.append(f"uv run pytest tests/recipes -k {shlex.quote(' or '.join(sorted(recipes)))}")
    return lines


def changed(since: str = "HEAD") -> list[str]:
    """Files that differ from a commit, and those that git does not know yet."""

    def lines(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()

    (base,) = lines("merge-base", "HEAD", since)
    names = {*lines("diff", "--name-only", base), *lines("ls-files", "--others", "--exclude-standard")}
    return sorted(name for name in names if (ROOT / name).is_file() or not is_test(name))


def of_row(row: str) -> list[str]:
    """Its files."""
    if row.startswith("pyproject.toml"):
        return ["pyproject.toml", ".ci/run"]
    folder = row.removesuffix("*.py")
    found = [name for name in sources(folder) if not is_test(name) and not name.startswith(OF_ALL)]
    if row.endswith("*.py"):
        found = [name for name in found if Path(name).parent == Path(folder) and name != "common/session.py"]
    return found


def table() -> str:
    """One row for each folder: its own tests, and where others are that import one of its files."""
    lines = ["| you changed | run | for some of the files, also tests in |", "|---|---|---|"]
    for row in ROWS:
        files = of_row(row)
        needed = collapse({one for name in files for one in of_file(name)} - {*ALWAYS})
        wanted = {*OWN.get(row, ()), f"tests/{Path(row).name}", f"tests/test_{Path(row).stem}.py"}
        if row == "common/*.py":
            wanted = {f"tests/test_{Path(name).stem}.py" for name in files}
        own = [one for one in needed if one in wanted or needed == ["tests"]]
        command = f"uv run pytest {' '.join(own)}" if own else "uv run python -m tests.which"
        command += " -k <recipe>" if row == "recipes/" else ""
        others = dict.fromkeys(one.removeprefix("tests/").partition("/")[0] for one in needed if one not in own)
        lines.append(f"| `{row}` | `{command.removesuffix(' tests')}` | {', '.join(others)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the commands, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="changed files, from the repository's root")
    parser.add_argument("--since", default="HEAD", metavar="COMMIT", help="where the change begins; default: HEAD")
    parser.add_argument("--table", action="store_true", help=f"write the table in {PAGE.name}")
    given = parser.parse_args()
    if given.table:
        PAGE.write_text(pages.fill(PAGE.read_text(), which=table()))
        return
    print("\n".join(commands(given.files or changed(given.since))))


if __name__ == "__main__":
    main()
