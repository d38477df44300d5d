"""Each tool answers --help and refuses a wrong flag before it imports what takes seconds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import runner
from tools import about

TOOLS = sorted(path.parent.name for path in about.ROOT.glob("tools/*/__main__.py"))
HEAVY = {"accelerate", "datasets", "numpy", "pyarrow", "tensorboard", "torch", "torchvision"}


def run(tool: str, *words: str) -> tuple[int, str, str, set[str]]:
    """Exit code, output, errors, and what was imported, also by processes that it has started."""
    done = subprocess.run(
        [sys.executable, "-m", f"tools.{tool}", *words],
        cwd=about.ROOT,
        env=os.environ | {"PYTHONPROFILEIMPORTTIME": "1"},
        capture_output=True,
        text=True,
        timeout=runner.HANG_S,
        check=False,
    )
    lines = done.stderr.splitlines()
    imports = [line for line in lines if line.startswith("import time:")]
    errors = "\n".join(line for line in lines if line not in imports)
    return done.returncode, done.stdout, errors, {line.rpartition("|")[2].strip() for line in imports}


def test_there_is_no_tool_beside_them() -> None:
    assert len(TOOLS) > 3
    assert not [path for path in about.ROOT.glob("tools/*.py") if '__name__ == "__main__"' in path.read_text()]


@pytest.mark.parametrize("tool", TOOLS)
def test_help(tool: str) -> None:
    code, out, errors, imported = run(tool, "--help")
    assert (code, errors) == (0, "")
    assert "usage: " in out
    assert "common" in imported or "tools" in imported
    assert not imported & HEAVY


@pytest.mark.parametrize("tool", TOOLS)
def test_wrong_flag(tool: str) -> None:
    code, out, errors, imported = run(tool, "--no-such-flag")
    assert (code, out) == (2, "")
    assert "Traceback" not in errors
    assert len(re.findall("no-such-flag|Missing value for", errors)) == 1, errors
    assert not imported & HEAVY


def test_mutant(tmp_path: Path) -> None:
    """What a right command imports would be seen."""
    assert "torch" in run("checkpoint", "verify", str(tmp_path))[3]


# --- without the environment ---

NO_SITE = [sys.executable, "-S", "-m"]  # no package but Python's own
SENTENCE = "error: {python} has no [a-z]+: run `source .venv/bin/activate` in .*\n"


def bare(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run where nothing leads to the environment's packages."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=about.ROOT, env=env, capture_output=True, text=True, timeout=runner.HANG_S, check=False
    )


def is_sentence(errors: str) -> bool:
    """That the environment is missing."""
    return bool(re.fullmatch(SENTENCE.format(python=re.escape(sys.executable)), errors))


@pytest.mark.parametrize("tool", TOOLS)
def test_without_the_environment(tool: str) -> None:
    done = bare([*NO_SITE, f"tools.{tool}", "--help"])
    if done.returncode:
        assert is_sentence(done.stderr), done.stderr
    else:  # it needs no package
        assert "usage: " in done.stdout


WITHOUT_TORCH = [
    ("checkpoint", ["verify", "."]),
    ("profile", ["."]),
    ("prove", []),
    ("plan", ["--calibrate", "none/mine.toml"]),
]


@pytest.mark.parametrize(("tool", "words"), WITHOUT_TORCH, ids=[one[0] for one in WITHOUT_TORCH])
def test_torch_alone_is_missing(tool: str, words: list[str]) -> None:
    """What a tool imports when its flags are right."""
    run_it = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_module('tools.{tool}', {{}}, '__main__')"
    done = bare([sys.executable, "-c", run_it, *words])
    assert done.returncode == 1
    assert is_sentence(done.stderr), done.stderr


def test_another_error_has_its_traceback() -> None:
    for error in ("ModuleNotFoundError(name='tools.none')", "ModuleNotFoundError(name='json')", "KeyError(1)"):
        done = bare([sys.executable, "-c", f"import tools; raise {error}"])
        assert "Traceback" in done.stderr, error
        assert not is_sentence(done.stderr)
