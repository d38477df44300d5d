"""The walk through docs/fine_tuning.md: its programs and commands, as they stand there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.harness.runner import ROOT

PAGE = ROOT / "docs" / "fine_tuning.md"
PROGRAM = re.compile(r"^<!-- (\w+\.py) -->\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^    ((?:python|bash) (?:.*\\\n)*.*)$", re.MULTILINE)


def walk(folder: Path, *flags: str) -> dict[str, str]:
    """What each command of the page prints, by the command, and at last `ask.py` of both models, by "before", "after".

    Args:
        folder: where they run.
        flags: further ones for the trainings.
    """
    page = PAGE.read_text()
    for name, content in PROGRAM.findall(page):
        (folder / name).write_text(content)
    # As with the environment of the clone active, in the folder of the user.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path, "NPROC_PER_NODE": "2"}
    commands = [shlex.split(one.replace("\\\n", " ")) for one in COMMAND.findall(page)]
    told = {}
    for command in commands:
        trains = command[:2] == ["bash", "launch/torchrun.sh"]
        here = [str(ROOT / part) if part.startswith(("launch/", "recipes/")) else part for part in command]
        told[shlex.join(command)] = _run([*here, *(flags if trains else ())], folder, env)
    for name in ("before", "after"):
        told[name] = _run(["python", "ask.py", name], folder, env)
    return told


def _run(command: list[str], folder: Path, env: dict[str, str]) -> str:
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{result.stdout}{result.stderr}")
    return result.stdout
