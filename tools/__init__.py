"""What one runs by hand, before and after a job. Without its environment, each tool says so in one sentence."""

import importlib.util
import sys
from types import TracebackType

OURS = ("benchmarks", "common", "launch", "recipes", "tests", "tools")  # that one of these is missing is a fault
_shown = sys.excepthook


def _explained(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Name the package that this Python lacks, and the way to one that has it; show any other error as ever."""
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not missing or missing in OURS or missing in sys.stdlib_module_names:
        _shown(kind, error, trace)
        return
    here = "run `source .venv/bin/activate` in the repository's folder (`uv sync` makes it), and the command again"
    print(f"error: {sys.executable} has no {missing}: {here}", file=sys.stderr)


def need(package: str) -> None:
    """Say that a package is missing before a launcher starts processes, each of which would say so in its own way."""
    if not importlib.util.find_spec(package):
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


sys.excepthook = _explained
