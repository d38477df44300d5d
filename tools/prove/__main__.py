"""The proofs of Brigade on this machine: `python -m tools.prove`. It starts one rank per GPU, or NPROC_PER_NODE."""

import os
import sys
from pathlib import Path

import tyro

from common import UserError
from tools import command, need
from tools.prove import flags

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    try:
        flags.check(tyro.cli(flags.Args, prog="python -m tools.prove"))  # before ranks are started
    except UserError as error:
        command.refuse(error)
    need("torch")
    os.environ.setdefault("PYTHON", sys.executable)  # this one has torch, whatever environment is active
    os.environ.setdefault("LAUNCHED_AS", f"{sys.executable} -m tools.prove")
    launcher = str(HERE.parents[1] / "launch" / "torchrun.sh")
    os.execvp("bash", ["bash", launcher, str(HERE), *sys.argv[1:]])  # noqa: S606, S607 (bash as users have it)
