"""The way out of a script: the recipe nearest to it, and which function or flag of its train.py takes which lines."""

import ast
import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools import about
from tools.judge.port_table import EVALUATES, FLAGS, PLACES, STRATEGIES, TOKENS, TRAINS, Place

MOST_FILES = 20  # of the user's, that a script imports


@dataclass(frozen=True)
class Row:
    """Lines of the script, and what takes them: a function with its section, or a flag."""

    lines: str
    what: str
    into: str
    how: str


@dataclass(frozen=True)
class Port:
    """The nearest recipe, why, and the table."""

    recipe: str
    reason: str
    rows: list[Row]


def sources(script: Path) -> dict[Path, ast.Module]:
    """The script, and the modules beside it that it imports."""
    found: dict[Path, ast.Module] = {}
    waiting = [script]
    while waiting and len(found) < MOST_FILES:
        path = waiting.pop(0)
        try:
            found[path] = ast.parse(path.read_text(errors="replace"))
        except (SyntaxError, ValueError):  # the verdict says so
            continue
        for node in ast.walk(found[path]):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module or ''}", *(f"{node.module or ''}.{one.name}" for one in node.names)]
            files = [
                folder / f"{name.replace('.', '/')}.py" for name in names for folder in (script.parent, path.parent)
            ]
            waiting += [one for one in dict.fromkeys(files) if one.is_file() and one not in {*found, *waiting}]
    return found


def names(trees: dict[Path, ast.Module]) -> dict[str, str]:
    """Each name that is used in the files, and each module that is imported, with the line where it first is."""
    found: dict[str, str] = {}
    for path, tree in trees.items():
        for node in [one for one in ast.walk(tree) if not isinstance(one, ast.alias)]:
            own = [str(getattr(node, key)) for key in ("id", "attr", "name", "module") if getattr(node, key, None)]
            for name in [one.name for one in node.names] if isinstance(node, ast.Import) else own:
                found.setdefault(name, f"{os.path.relpath(path)}:{getattr(node, 'lineno', 1)}")
    return found


def nearest(shown: dict[str, str], said: dict[str, str]) -> tuple[str, str]:
    """A recipe and the reason, from what a run has shown (`port_seen.traits`) and the names that stand in the files."""
    tokens = next((f"{one} at {at}" for one, at in said.items() if re.search(TOKENS, one)), "")
    for rule in STRATEGIES:
        hits = [at for name, at in shown.items() if rule.seen and name == rule.seen]
        if rule.names and (rule.always or "steps" not in shown):
            hits += [at for name, at in said.items() if re.fullmatch(rule.names, name)]
        if not hits and (rule.seen or rule.names):
            continue
        found = [one for one in about.RECIPES if one.rpartition("_")[0] == rule.strategy]
        own = [one for one in found if about.workload(one) == ("gpt" if tokens else "resnet")]
        if not own and rule.strategy == "multinode":
            continue
        reason = rule.reason + (f" at {hits[0]}" if hits and hits[0] else "")
        if len(found) > 1:
            reason += f"; tokens: {tokens}" if tokens else "; no tokens are read"
        return (own or found)[0], reason
    raise AssertionError("the last strategy has no condition")


@functools.cache
def sections(recipe: str) -> dict[str, int]:
    """The functions and classes of a recipe's train.py, with the section each stands in."""
    text = about.source(recipe)
    begins = [(text[: one.start()].count("\n") + 1, int(one[1])) for one in re.finditer(r"^# --- (\d)", text, re.M)]
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {
        node.name: max([number for line, number in begins if line < node.lineno], default=0)
        for node in ast.parse(text).body
        if isinstance(node, kinds)
    }


def heads(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What a node is, in words that the patterns of `PLACES` look for; and the node whose lines count."""
    if isinstance(node, ast.ClassDef):
        yield f"class {node.name}({', '.join(map(ast.unparse, node.bases))})", node
    elif isinstance(node, ast.FunctionDef):
        text = ast.unparse(node)
        quiet = re.search(EVALUATES, text) and not re.search(TRAINS, text)
        yield f"def {node.name}" + (" evaluates" if quiet else ""), node
    elif isinstance(node, ast.Assign):
        target, pairs = node.targets[0], [(node.targets[0], node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = [*zip(target.elts, node.value.elts, strict=False)]
        yield from ((f"{ast.unparse(one)} = {ast.unparse(value)}", node) for one, value in pairs)
    elif isinstance(node, ast.Call):
        yield f"call {ast.unparse(node)}", node


def found_in(tree: ast.AST) -> Iterator[tuple[Place, str, ast.AST]]:
    """The places that parts of a file belong to, each part once."""
    for node in ast.iter_child_nodes(tree):
        hit = False
        for text, part in heads(node):
            place = next((one for one in PLACES if re.search(one.pattern, text)), None)
            if place:
                yield place, text, part
                hit = hit or place.whole
        if not hit:
            yield from found_in(node)


def target(recipe: str, alternatives: tuple[str, ...]) -> str:
    """The first function or flag of these that the recipe has, in words."""
    known = sections(recipe)
    for one in alternatives:
        if one.startswith("--") and about.has_flag(recipe, one):
            return one
        if one in known:
            return f"{one} (section {known[one]})"
    return ""


def flag_of(recipe: str, text: str) -> tuple[str, str]:
    """A flag of the script, and the recipe's flag for it, or its Args."""
    own = re.search(r"""['"]--([\w-]+)['"]""", text)
    name = own[1].replace("-", "_") if own else ""
    known = [new for pattern, new in FLAGS if re.fullmatch(pattern, name)]
    into = target(recipe, (f"--{name.replace('_', '-')}", *known)) or target(recipe, ("Args",))
    return (f"--{own[1]}" if own else "flags"), into


def port(script: Path, shown: dict[str, str]) -> Port:
    """Where a script's parts go."""
    trees = sources(script)
    recipe, reason = nearest(shown, names(trees))
    found: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for path, tree in trees.items():
        for place, text, node in found_in(tree):
            what, into = (place.what, target(recipe, place.into)) if place.into else flag_of(recipe, text)
            if into:
                first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", 1)
                lines = found.setdefault((what, into, place.how), {}).setdefault(os.path.relpath(path), [])
                lines += [one for one in [str(first) if first == last else f"{first}-{last}"] if one not in lines]
    order = [one.what for one in PLACES]
    rows = [
        Row("; ".join(f"{name}:{', '.join(lines)}" for name, lines in files.items()), *key)
        for key, files in sorted(found.items(), key=lambda one: order.index(one[0][0]) if one[0][0] in order else 99)
    ]
    return Port(recipe, reason, rows)


def as_text(found: Port) -> str:
    """For people."""
    lines = [f"the way out: recipes/{found.recipe} ({found.reason})"]
    lines.append(f"    python -m tools.copy recipes/{found.recipe} my_project, then in my_project/train.py:")
    for row in found.rows:
        lines.append(f"    {row.into:<30} {row.what}{', ' + row.how if row.how else ''}: {row.lines}")
    return "\n".join(lines)
