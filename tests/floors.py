"""Who imports whom in common/, on which floor, and what reaches back: read from the source, which is never imported.

A module is named as Python does, such as `common.run.exits`. An arrow is an import from one module of common/ to
another, wherever it stands: in a function, below `if TYPE_CHECKING`, or as a name in a string.
"""

import ast
import functools
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

# From top to bottom: a floor uses itself and those below it. The first and the last are no folders: one module, and all
# others that lie in common/ itself.
FLOORS = ("session", "protect", "measure", "track", "state", "store", "run", "workloads", "train", "ground")
DELETABLE = ("protect", "measure", "track")  # with `rm -r` and the lines of session.py that end so: "# protect"
PARTS = ("recipes", "common", "launch", "tools", "tests", "benchmarks")  # packages of the repository
# Methods that change what they are called on: of lists, dicts, sets, queues and events.
CHANGES = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "put"),
    *("remove", "reverse", "set", "setdefault", "sort", "update"),
}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True, order=True)
class Import:
    """One import of a module of common/.

    Attributes:
        module: who imports.
        target: what.
        line: of the source.
        hides: why a reader of the top of the file does not see it; "" if he does.
    """

    module: str
    target: str
    line: int
    hides: str = ""

    def __str__(self) -> str:
        where = f"{self.module}:{self.line} imports {self.target}"
        return f"{where} {self.hides}" if self.hides else where


def modules(root: Path) -> dict[str, Path]:
    """Every module of a checkout's common/ by name; a package is its __init__.py."""
    found = {}
    for path in sorted(root.glob("common/**/*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _packages(known: Mapping[str, Path]) -> dict[str, bool]:
    """Each module's name, and whether it is a package."""
    return {name: path.name == "__init__.py" for name, path in known.items()}


@functools.cache
def parse(text: str) -> ast.Module:
    """The syntax tree of a source, which nobody changes."""
    return ast.parse(text)


@functools.cache
def import_nodes(text: str) -> list[ast.Import | ast.ImportFrom]:
    """The imports of a source, also those inside functions: of all nodes, only statements are looked at."""
    nodes: list[ast.AST] = [parse(text)]
    for node in nodes:
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            nodes += getattr(node, field, [])
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(root: Path) -> list[Import]:
    """All imports of modules of common/ by modules of common/."""
    known = modules(root)
    packages = tuple(_packages(known).items())
    return sorted({one for name, path in known.items() for one in _imports(name, path.read_text(), packages)})


@functools.cache
def _imports(name: str, text: str, packages: tuple[tuple[str, bool], ...]) -> list[Import]:
    known = dict(packages)
    found = []
    nodes: list[tuple[ast.AST, bool]] = [(parse(text), False)]  # each, and whether it is inside a function
    while nodes:
        node, inside = nodes.pop()
        within = inside or isinstance(node, FUNCTIONS)
        nodes += [(child, within) for child in ast.iter_child_nodes(node)]
        for target in _targets(node, name if known[name] else name.rpartition(".")[0], known):
            hides = ""
            if isinstance(node, ast.Constant):
                hides = "by a string"
            elif inside:
                hides = "inside a function"
            elif known[name]:
                hides = "for all who import from its folder"
            elif isinstance(node, ast.Import):
                hides = "and may use all of common: write `from ... import`"
            elif known[target] and target != "common":
                hides = "and may use all that lies there: name the module"
            found.append(Import(name, target, node.lineno, hides))
    return found


def _targets(node: ast.AST, package: str, known: Mapping[str, object]) -> Set[str]:
    """Modules of common/ that a statement imports."""
    names = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        parts = package.split(".")
        base = [*parts[: len(parts) - node.level + 1], *(node.module or "").split(".")] if node.level else [node.module]
        origin = ".".join(part for part in base if part)
        names = [f"{origin}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("common."):
        names = [node.value] if node.value in known else []
    found = set()
    for name in names:
        while name and name not in known:
            name = name.rpartition(".")[0]  # noqa: PLW2901 (what is no module is a name in one)
        found.add(name)
    return found - {""}


def names(path: Path, known: Mapping[str, Path]) -> Mapping[str, str]:
    """What a file calls modules of common/, and what it imports out of them, by its name there."""
    return _names(path.read_text(), tuple(known))


@functools.cache
def _names(text: str, known: tuple[str, ...]) -> Mapping[str, str]:
    found = {}
    for node in import_nodes(text):
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            if _targets(node, "", dict.fromkeys(known)):
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def arrows(root: Path) -> set[tuple[str, str]]:
    """Pairs of modules of common/ of which the first imports the second; packages hold nothing that counts."""
    known = modules(root)
    pairs = {(one.module, one.target) for one in imports(root)}
    return {pair for pair in pairs if not any(known[name].name == "__init__.py" for name in pair)}


def reached(pairs: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """All modules that each module imports, directly or through others."""
    found: dict[str, set[str]] = {}
    for module, target in pairs:
        found.setdefault(module, set()).add(target)
        found.setdefault(target, set())
    for through, further in found.items():
        for targets in found.values():
            if through in targets:
                targets.update(further)
    return found


def circles(pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Groups of modules that all import each other, directly or through others of the group."""
    found = reached(pairs)
    groups = [{other for other in found[module] if module in found[other]} for module in found]
    return sorted({tuple(sorted(group)) for group in groups if group})  # type: ignore[arg-type]


def has_floors(root: Path) -> bool:
    """Whether a checkout's common/ lies on floors, or all of its modules beside each other."""
    return all((root / "common" / floor).is_dir() for floor in FLOORS[1:-1])


def floor(module: str) -> str:
    """The floor on which a module lies.

    Raises:
        AssertionError: it lies in a folder that is no floor.
    """
    _, *folders, name = module.split(".") if module != "common" else ("", "common")
    if not folders:
        return name if name in FLOORS else FLOORS[-1]  # a package is on its own floor, the one of the roof is not one
    assert folders[0] in FLOORS[1:-1], f"{module} lies on no floor: add its folder to FLOORS, where it belongs"
    return folders[0]


def upward(root: Path) -> list[Import]:
    """Imports of something that lies on a higher floor."""
    return [one for one in imports(root) if FLOORS.index(floor(one.target)) < FLOORS.index(floor(one.module))]


def leaning(root: Path) -> list[Import]:
    """Imports that would break if somebody deleted a floor that he may delete; only the roof may have them."""
    return [
        one
        for one in imports(root)
        if floor(one.target) in DELETABLE and floor(one.module) not in {floor(one.target), FLOORS[0]}
    ]


def hidden(root: Path) -> list[Import]:
    """Imports that a reader of the top of the file does not see."""
    return [one for one in imports(root) if one.hides]


def foreign(root: Path) -> list[str]:
    """Imports of one part of the repository by another that may not be: a recipe may import common, common none."""
    found = []
    for path in [*sorted(root.glob("recipes/*/*.py")), *modules(root).values()]:
        part = path.relative_to(root).parts[0]
        beside = {file.stem for file in path.parent.glob("*.py")} if part == "recipes" else set()
        for node in import_nodes(path.read_text()):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module or "."] if not node.level else [] if part == "common" else ["."]
            tops = {name.partition(".")[0] or "." for name in names}
            for top in sorted(tops & {".", *PARTS, *beside} - {"common"}):
                found.append(f"{path.relative_to(root)}:{node.lineno} imports {'a neighbour' if top == '.' else top}")
    return found


def find(root: Path, *names: str) -> list[str]:
    """Full names of modules by their last names, on whatever floor they lie."""
    known = modules(root)
    found = []
    for name in names:
        (full,) = [module for module in known if module.rpartition(".")[2] == name]
        found.append(full)
    return found


def closure(root: Path, *names: str) -> list[str]:
    """Modules by their last names, and all that they import; without packages."""
    wanted = find(root, *names)
    everything = reached(arrows(root))
    return sorted({*wanted, *(target for module in wanted for target in everything.get(module, ()))})


# --- What speaks backwards --------------------------------------------------------------------------------


def variables(text: str) -> set[str]:
    """Names that a module assigns at its top level."""
    found = set()
    for node in parse(text).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            found |= {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
    return found


def is_constant(name: str) -> bool:
    """Whether a name at the top level promises that nobody changes it: STEP, __version__, types as Sums and _Chunk."""
    return name.lstrip("_")[:1].isupper() or (name.startswith("__") and name.endswith("__"))


def backwards(root: Path) -> list[str]:
    """What passes something on behind the back of its reader, in common/.

    That is: `global`; a change of sys.argv; a change of a module, or of something that a module holds, by another
    module; and the use of a variable of another module that is no constant, because somebody has to fill it in.
    """
    known = modules(root)
    texts = {name: path.read_text() for name, path in known.items()}
    packages = tuple(_packages(known).items())
    found = []
    for name, text in texts.items():
        for line, what, module, used in _read(name, text, packages):
            if not used:
                found.append(f"{name}:{line} {what}")
            elif not is_constant(used) and used in variables(texts[module]):
                found.append(f"{name}:{line} uses {module}.{used}, a variable")
    return found


def kept(root: Path) -> list[str]:
    """Variables that a module's own functions change, as `common.keymap._counters_of`: they outlive a training."""
    found = set()
    for name, path in modules(root).items():
        own = tuple(variables(path.read_text()))
        found |= {f"{name}.{what}" for _, what, *_ in _read(name, path.read_text(), (), own) if what in own}
    return sorted(found)


@functools.cache
def _read(
    name: str, text: str, packages: tuple[tuple[str, bool], ...], own: tuple[str, ...] = ()
) -> list[tuple[int, str, str, str]]:
    """What `_Backwards` finds: line, what; and what a name of another module is used for, which may be no variable."""
    reader = _Backwards(name, dict(packages), frozenset(own))
    reader.visit(parse(text))
    return sorted(set(reader.found))


class _Backwards(ast.NodeVisitor):
    """Looks at one module; where a function's own variable has the name of an import, the variable counts.

    Args:
        name: the module's.
        known: all modules, and whether they are packages.
        own: look for changes of these variables of the module itself, by its functions, instead.
    """

    def __init__(self, name: str, known: Mapping[str, bool], own: Set[str]) -> None:
        self.found: list[tuple[int, str, str, str]] = []
        self._name = name
        self._known = known
        self._own = own
        self._modules: dict[str, str] = {}  # the name that stands for a module here
        self._values: dict[str, str] = dict.fromkeys(own, "")  # or for something out of one, and that one
        self._local: list[set[str]] = []  # of each function around

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        package = self._name if self._known.get(self._name) else self._name.rpartition(".")[0]
        for alias in node.names:
            one = ast.ImportFrom(node.module, [alias], node.level)
            here = alias.asname or alias.name
            for target in _targets(one, package, self._known):
                if target.rpartition(".")[2] == alias.name:
                    self._modules[here] = target
                else:
                    self._values[here] = target
                    self.found.append((node.lineno, "", target, alias.name))
            if (node.module, alias.name) == ("sys", "argv"):
                self._note(node, "takes argv out of sys: somebody may change it")

    def visit_Global(self, node: ast.Global) -> None:
        self._note(node, f"has `global {', '.join(node.names)}`")

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        stored = [one for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
        arguments = [one for one in ast.walk(node.args) if isinstance(one, ast.arg)]
        shared = {name for one in ast.walk(node) if isinstance(one, ast.Global) for name in one.names}
        self._local.append(({one.id for one in stored} | {one.arg for one in arguments}) - shared)
        self.generic_visit(node)
        self._local.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit_FunctionDef(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self._own and isinstance(node.ctx, ast.Store | ast.Del) and self._is_outer(node):
            self._note(node, node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._look_at(node)
        if isinstance(node.value, ast.Name) and (module := self._module(node.value)):
            self.found.append((node.lineno, "", module, node.attr))
            if node.attr == "__dict__":
                self._note(node, f"takes the variables of {module}")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._look_at(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in CHANGES:
            self._changes(function.value)
        if isinstance(function, ast.Name) and function.id in {"setattr", "delattr", "vars"} and node.args:
            first = node.args[0]
            module = self._module(first) if isinstance(first, ast.Name) else ""
            if module:
                self._note(node, f"has {function.id}({module})")
            elif function.id != "vars":
                self._changes(first)
        self.generic_visit(node)

    def _look_at(self, node: ast.Attribute | ast.Subscript) -> None:
        """Of something that is assigned or deleted: whose is it?"""
        if isinstance(node.ctx, ast.Load):
            return
        whole = isinstance(node, ast.Attribute)
        if whole and isinstance(node.value, ast.Name) and self._module(node.value):
            self._note(node, f"changes {self._module(node.value)}.{node.attr}")
        else:
            self._changes(node if ast.unparse(node) == "sys.argv" else node.value)

    def _changes(self, node: ast.expr) -> None:
        """Something in or below `node` is changed: whose is it?"""
        if ast.unparse(node) == "sys.argv":
            self._note(node, "changes sys.argv")
            return
        chain = [node]
        while isinstance(chain[-1], ast.Attribute | ast.Subscript):
            chain.append(chain[-1].value)
        name = chain[-1]
        if not isinstance(name, ast.Name):
            return
        if (module := self._module(name)) and len(chain) > 1:
            self._note(node, f"changes {module}.{ast.unparse(node).partition('.')[2]}")
        elif name.id in self._values and self._is_outer(name):
            self._note(node, name.id if self._own else f"changes {self._values[name.id]}.{ast.unparse(node)}")

    def _module(self, name: ast.Name) -> str:
        return self._modules.get(name.id, "") if self._is_outer(name) else ""

    def _is_outer(self, name: ast.Name) -> bool:
        """Whether no function around has a variable of that name; of `own`, only what a function does counts."""
        return not any(name.id in names for names in self._local) and (bool(self._local) or not self._own)

    def _note(self, node: ast.AST, what: str) -> None:
        self.found.append((node.lineno, what, "", ""))
