"""The doctor on this machine alone, with one process: `python -m tools.doctor`."""

import os
import sys
from pathlib import Path

from tools.doctor import around

if __name__ == "__main__":
    for name in ("NNODES", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):  # of a job that this is not
        os.environ.pop(name, None)
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])  # for the rank
    sys.exit(around.main([sys.executable, str(Path(__file__).with_name("train.py")), *sys.argv[1:]]))
