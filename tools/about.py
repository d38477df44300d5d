"""The recipes that there are, as their source declares them, and this machine's processor."""

import ast
import functools
import importlib.util
import platform
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path.parent.name for path in ROOT.glob("recipes/*/train.py"))


def cpu_name() -> str:
    """Model of this machine's processor, for what is written beside a measurement."""
    file = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", file.read_text() if file.exists() else "", re.MULTILINE)
    return names[0] if names else platform.machine()


def source(recipe: str) -> str:
    """Text of a recipe's train.py."""
    return (ROOT / "recipes" / recipe / "train.py").read_text()


def workload(recipe: str) -> str:
    """What it trains: the last word of its name."""
    return recipe.rpartition("_")[2]


def load(path: Path) -> ModuleType:
    """A train.py as a module of this process, with its Args and functions, and without its main."""
    spec = importlib.util.spec_from_file_location("train", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["train"] = module  # where the types of a dataclass's fields are looked up
    sys.path.insert(0, str(path.resolve().parent))  # as for `python train.py`: modules beside it
    spec.loader.exec_module(module)
    return module


@functools.cache
def fields(recipe: str) -> dict[str, ast.AnnAssign]:
    """The fields of a recipe's Args by name, its own and those that it inherits, as their sources declare them."""
    return _fields(ROOT / "recipes" / recipe / "train.py", "Args")


def _fields(path: Path, name: str) -> dict[str, ast.AnnAssign]:
    """Of a dataclass in a file; an own field replaces an inherited one."""
    tree = _tree(path)
    places = {alias.name: one.module for one in tree.body if isinstance(one, ast.ImportFrom) for alias in one.names}
    kind = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if kind is None:
        return _fields(_file(f"{places[name]}"), name)
    found: dict[str, ast.AnnAssign] = {}
    for base in reversed(kind.bases):
        module, _, attribute = ast.unparse(base).rpartition(".")
        found |= _fields(_file(f"{places[module]}.{module}") if module else path, attribute)
    own = [node for node in kind.body if isinstance(node, ast.AnnAssign)]
    return found | {node.target.id: node for node in own if isinstance(node.target, ast.Name)}


@functools.cache
def _tree(path: Path) -> ast.Module:
    """Many recipes inherit flags from the same file."""
    return ast.parse(path.read_text())


def _file(module: str) -> Path:
    return ROOT / f"{module.replace('.', '/')}.py"


def has_flag(recipe: str, flag: str) -> bool:
    """Whether a recipe has a flag."""
    return flag.lstrip("-").replace("-", "_") in fields(recipe)


def choices(recipe: str, flag: str) -> list[str]:
    """What a flag of type Literal may be, its default first."""
    field = fields(recipe)[flag.lstrip("-").replace("-", "_")]
    assert field.value
    assert isinstance(field.annotation, ast.Subscript)
    default = ast.literal_eval(field.value)
    return sorted(ast.literal_eval(field.annotation.slice), key=lambda choice: choice != default)


@functools.cache
def is_single(recipe: str) -> bool:
    """Whether its launch.env says that it is one process."""
    env = ROOT / "recipes" / recipe / "launch.env"
    return env.exists() and "NPROC_PER_NODE=1" in env.read_text()


@functools.cache
def trainings() -> list[str]:
    """The recipes that train; another one simulates. It reads all of their sources."""
    return [recipe for recipe in RECIPES if has_flag(recipe, "--lr")]
