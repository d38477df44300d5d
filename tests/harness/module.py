"""A recipe's file as a module of this process: its Args and functions, without its main and without ranks."""

import functools
import importlib.util
import sys
from types import ModuleType

from tests.harness import runner


@functools.cache
def load(recipe: str) -> ModuleType:
    """Import a recipe's train.py (by name), which defines things and runs nothing."""
    name = f"loaded_{recipe}"
    spec = importlib.util.spec_from_file_location(name, runner.ROOT / "recipes" / recipe / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and tyro look there
    spec.loader.exec_module(module)
    return module
