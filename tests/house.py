"""The house in figures: how much there is to read, how it hangs together, and how far a recipe is from its base.

    python -m tests.house                       # of this checkout
    python -m tests.house --beside ../before    # of two: before and after
    python -m tests.house --json

Each run of the tests prints them in short, with a light on what is over its budget. All is read from the source, which
is never imported. Lines of code are those without docstrings, comments and blank lines.
"""

import argparse
import ast
import difflib
import functools
import io
import json
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.copy import trees

from tests import floors

ROOT = Path(__file__).resolve().parents[1]
COPIED = "ddp_resnet"  # which docs/adapt.md copies
PROGRAMS = {".py", ".sh", ".yaml", ".env", ""}  # ends of the files that such a copy is made of; "": Dockerfile

# Budgets: a light goes on above them, and `tests/test_house.py` fails. Split or delete before raising one.
RECIPE = 300  # lines of code of a train.py
TWIN = 120  # of the bare.py beside it
MODULE = 200  # of a module of common/
COMMON = 4050  # of common/ without its workloads, common/store and common/track
STORE = 750  # of common/store
TRACK = 300  # of common/track
APART = ("workloads", "store", "track")  # floors with a budget of their own, or none
MAIN = 30  # of a recipe's main
CALLS = 18  # out of it: of modules of common/, and of what they have made
LOCALS = 20  # its variables
FLAGS = {"resnet": 20, "gpt": 22}  # in section 1 of what stands for a workload
# Changed lines of code of the lessons that one reads first.
LESSONS = {
    ("dp_resnet", "ddp_resnet"): 25,
    ("ddp_resnet", "multinode_resnet"): 18,
    ("ddp_gpt", "fsdp_gpt"): 38,
    ("fsdp_gpt", "tensor_gpt"): 70,
    ("ddp_gpt", "accelerate_gpt"): 70,
    ("ddp_gpt", "pipeline_gpt"): 150,
}


def docstring_lines(text: str) -> set[int]:
    """Numbers of the lines of all docstrings."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(floors.parse(text)) if isinstance(node, kinds)]
    docstrings = [node.body[0] for node in nodes if ast.get_docstring(node) is not None]
    return {line for node in docstrings for line in range(node.lineno, node.end_lineno + 1)}


def code(text: str, first: int = 1, last: int | None = None) -> list[str]:
    """The lines of code from one line to another, without the comments behind them."""
    return [line for number, line in _numbered(text) if number >= first and (last is None or number <= last)]


@functools.cache
def _numbered(text: str) -> list[tuple[int, str]]:
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    skipped = docstring_lines(text)
    return [(number, line.rstrip()) for number, line in enumerate(lines, 1) if line.strip() and number not in skipped]


def changed(base: str, text: str) -> int:
    """Lines of code that a diff of two files removes and adds."""
    lines = list(difflib.unified_diff(code(base), code(text), n=0, lineterm=""))[2:]
    return sum(line[0] in "+-" for line in lines)


# --- Recipes ----------------------------------------------------------------------------------------------


def recipes(root: Path = ROOT) -> dict[str, Path]:
    """Each recipe's train.py."""
    return {path.parent.name: path for path in sorted(root.glob("recipes/*/train.py"))}


def base(path: Path) -> str:
    """The recipe that a train.py builds on, or ""."""
    found = re.search(r"^Base: recipes/(\w+)\.", path.read_text(), re.MULTILINE)
    return found[1] if found else ""


def pairs(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Each base and the recipe that builds on it."""
    for recipe, path in recipes(root).items():
        if base(path):
            yield base(path), recipe


def main_of(path: Path) -> ast.FunctionDef:
    """A recipe's main."""
    (main,) = [node for node in floors.parse(path.read_text()).body if getattr(node, "name", "") == "main"]
    assert isinstance(main, ast.FunctionDef)
    return main


def main_lines(path: Path) -> int:
    """Lines of code of main below its `def`."""
    main = main_of(path)
    return len(code(path.read_text(), main.body[0].lineno, main.end_lineno))


def num_locals(path: Path) -> int:
    """Variables of main."""
    names = [node for node in ast.walk(main_of(path)) if isinstance(node, ast.Name)]
    return len({node.id for node in names if isinstance(node.ctx, ast.Store)})


def calls_out(root: Path, path: Path) -> int:
    """Calls in main of what a module of common/ holds, and of the session, which is called run."""
    here = floors.names(path, floors.modules(root)).keys() | {"run"}
    calls = [node.func for node in ast.walk(main_of(path)) if isinstance(node, ast.Call)]
    return sum(_leftmost(function) in here for function in calls)


def _leftmost(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def looked_up(root: Path, path: Path) -> set[str]:
    """Names that a reader of a recipe has to look up in common/: what it imports, and attributes of that."""
    known = floors.modules(root)
    here = floors.names(path, known)
    found = set()
    for node in ast.walk(floors.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and _leftmost(node.value) in here and isinstance(node.value, ast.Name):
            found.add(f"{here[node.value.id]}.{node.attr}")
        elif isinstance(node, ast.Name) and here.get(node.id, "common") not in known:
            found.add(here[node.id])
    return found


def flags(root: Path, path: Path, name: str = "Args") -> tuple[set[str], set[str]]:
    """The fields that a dataclass declares itself, and all of them with those of its bases.

    Args:
        root: of the checkout.
        path: a file that defines the class, or imports it from common/.
        name: the class, as that file calls it: "Args" or "session.RunArgs".
    """
    known = floors.modules(root)
    classes = {node.name: node for node in floors.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        first, _, rest = name.partition(".")
        origin, _, last = f"{floors.names(path, known).get(first, '')}.{rest}".strip(".").rpartition(".")
        return flags(root, known[origin], last) if origin in known else (set(), set())
    fields = [node.target for node in classes[name].body if isinstance(node, ast.AnnAssign)]
    own = {target.id for target in fields if isinstance(target, ast.Name)}
    return own, own.union(*(flags(root, path, ast.unparse(one))[1] for one in classes[name].bases))


# --- A copy -----------------------------------------------------------------------------------------------


def marked(text: str, *deleted: str) -> list[int]:
    """Numbers of the lines that belong to floors: those that end with the comment `# protect`, or another's name."""
    ends = tuple(f"# {floor}" for floor in deleted)
    return [number for number, line in enumerate(text.splitlines(), 1) if deleted and line.rstrip().endswith(ends)]


def copied(root: Path, *deleted: str) -> int:
    """Lines of programs that a copy of ddp_resnet brings, as docs/adapt.md makes it; after deletion of floors."""
    left_out = trees.foreign(trees.of_checkout(root), COPIED) if (root / "tools" / "copy").exists() else set()
    roof = root / "common" / f"{floors.FLOORS[0]}.py"
    lines = -len(marked(roof.read_text(), *deleted))
    for path in [file for part in (f"recipes/{COPIED}", "common", "launch") for file in (root / part).rglob("*")]:
        inside = path.relative_to(root).parts
        if "/".join(inside) in left_out:
            continue
        if path.is_file() and path.suffix in PROGRAMS and "__pycache__" not in inside:
            lines += len(path.read_text().splitlines()) * (inside[:1] != ("common",) or inside[1] not in deleted)
    return lines


# --- All figures ------------------------------------------------------------------------------------------

Figures = dict[str, dict[str, int | None]]


def figures(root: Path = ROOT) -> Figures:
    """All figures of a checkout, by group; None where it has no such thing."""
    sizes = sizes_of(root)
    workloads, store, track = (_of(sizes, floor) for floor in APART)
    found: Figures = {}
    has_floors = floors.has_floors(root)
    found["common/"] = {
        "files": len(sizes),
        "lines of code without workloads, store and track": sum(sizes.values()) - workloads - store - track,
        "lines of code of workloads": workloads,
        "lines of code of store": store,
        "lines of code of track": track,
        f"modules of more than {MODULE} lines of code": sum(size > MODULE for size in sizes.values()),
        "arrows": len(floors.arrows(root)),
        "circles": len(floors.circles(floors.arrows(root))),
        "upward imports": len(floors.upward(root)) if has_floors else None,
        "imports that hide": len(floors.hidden(root)),
        "lines that speak backwards": len(floors.backwards(root)),
        "variables of modules that functions change": len(floors.kept(root)),
    }
    found[f"lines that a copy of {COPIED} brings"] = {
        "whole": copied(root),
        "without protect/": copied(root, "protect") if has_floors else None,
        "without measure/": copied(root, "measure") if has_floors else None,
        "without track/": copied(root, "track") if has_floors else None,
        "without all": copied(root, *floors.DELETABLE) if has_floors else None,
    }
    for name, path in recipes(root).items():
        own, everything = flags(root, path)
        found[name] = {
            "lines of code": len(code(path.read_text())),
            "of bare.py": len(code(bare.read_text())) if (bare := path.with_name("bare.py")).exists() else None,
            "own flags": len(own),
            "all flags": len(everything),
            "names outside": len(looked_up(root, path)),
            "main: lines": main_lines(path),
            "calls out": calls_out(root, path),
            "locals": num_locals(path),
        }
    paths = recipes(root)
    found["changed lines of code of a lesson"] = {
        f"{before} -> {after}": changed(paths[before].read_text(), paths[after].read_text())
        for before, after in pairs(root)
    }
    return found


def _of(sizes: dict[str, int], floor: str) -> int:
    """Lines of code of a floor."""
    return sum(size for name, size in sizes.items() if name.startswith(f"common.{floor}"))


def sizes_of(root: Path = ROOT) -> dict[str, int]:
    """Lines of code of each module of common/."""
    return {name: len(code(path.read_text())) for name, path in floors.modules(root).items()}


def lights(root: Path = ROOT) -> list[str]:
    """All that is over its budget, a line each."""
    over = []

    def look(what: str, number: int, most: int) -> None:
        if number > most:
            over.append(f"{what}: {number}, more than {most}")

    sizes = sizes_of(root)
    for name, size in sizes.items():
        look(f"{name}, lines of code", size, MODULE)
    own = sum(sizes.values()) - sum(_of(sizes, floor) for floor in APART)
    look("common/store, lines of code", _of(sizes, "store"), STORE)
    look("common/track, lines of code", _of(sizes, "track"), TRACK)
    look("common/ without workloads, store and track, lines of code", own, COMMON)
    paths = recipes(root)
    for name, path in paths.items():
        look(f"{name}, lines of code", len(code(path.read_text())), RECIPE)
        if (bare := path.with_name("bare.py")).exists():
            look(f"{name}, lines of code of bare.py", len(code(bare.read_text())), TWIN)
        look(f"{name}, lines of main", main_lines(path), MAIN)
        look(f"{name}, calls out of main", calls_out(root, path), CALLS)
        look(f"{name}, locals of main", num_locals(path), LOCALS)
        if workload(name) in FLAGS and stands_for_workload(root, name):
            look(f"{name}, flags of its own", len(flags(root, path)[0]), FLAGS[workload(name)])
    for pair, most in LESSONS.items():
        before, after = (paths[name].read_text() for name in pair)
        look(f"{' -> '.join(pair)}, changed lines of code", changed(before, after), most)
    return over


def workload(recipe: str) -> str:
    """What it trains: the last word of its name."""
    return recipe.rpartition("_")[2]


def stands_for_workload(root: Path, recipe: str) -> bool:
    """Whether it is the first recipe of its workload that runs on several ranks; see tests/harness/runner.py."""
    paths = recipes(root)

    def runs_on_several(name: str) -> bool:
        env = paths[name].with_name("launch.env")
        return not (env.exists() and "NPROC_PER_NODE=1" in env.read_text())

    before = base(paths[recipe])
    follows = workload(before) == workload(recipe)
    return runs_on_several(recipe) and not (follows and runs_on_several(before))


def report(root: Path = ROOT) -> str:
    """The figures of a checkout, and the lights that burn."""
    return "\n".join([table({"now": figures(root)}), *lights_lines(root)])


def lights_lines(root: Path = ROOT) -> list[str]:
    """The lights that burn, for people."""
    return [f"light: {light}" for light in lights(root)] or ["no light burns"]


def table(columns: dict[str, Figures]) -> str:
    """The figures of one checkout, or of one before and one after."""
    groups = list({group: None for found in columns.values() for group in found})
    upright = [group for group in groups if "calls out" not in next(iter(columns.values())).get(group, {})]
    recipes = [group for group in groups if group not in upright]
    lines = []
    for group in upright[:2]:
        lines += _grid([[group, *columns], *_rows(columns, group)])
    names = list({name: None for found in columns.values() for one in recipes for name in found.get(one, {})})
    rows = [[one, *(" > ".join(_numbers(columns, one, name)) for name in names)] for one in recipes]
    lines += _grid([[f"recipe: {' > '.join(columns)}", *names], *rows])
    for group in upright[2:]:
        lines += _grid([[group, *columns], *_rows(columns, group)])
    return "\n".join(lines)


def _rows(columns: dict[str, Figures], group: str) -> list[list[str]]:
    names = {name: None for found in columns.values() for name in found.get(group, {})}
    return [[f"  {name}", *_numbers(columns, group, name)] for name in names]


def _numbers(columns: dict[str, Figures], group: str, name: str) -> list[str]:
    numbers = [found.get(group, {}).get(name) for found in columns.values()]
    return ["-" if number is None else f"{number:,}" for number in numbers]


def _grid(rows: list[list[str]]) -> list[str]:
    """Lines of columns, the first to the left, the others to the right; and one that is empty."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return [*("  ".join(row).rstrip() for row in cells), ""]


def main(argv: Sequence[str] | None = None) -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.house", description="The house in figures.")
    parser.add_argument("--beside", type=Path, metavar="PATH", help="another checkout, which was before")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    columns = {"before": figures(args.beside.resolve())} if args.beside else {}
    columns["after" if args.beside else "now"] = figures()
    if args.json:
        print(json.dumps(columns | {"lights": lights()}, indent=1))
    else:
        print("\n".join([table(columns), *lights_lines()]))


if __name__ == "__main__":
    main()
