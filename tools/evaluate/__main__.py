"""Evaluate a run's checkpoint on one device: `python -m tools.evaluate RUN`."""

import tyro

from tools import command
from tools.evaluate.flags import Args

if __name__ == "__main__":
    args = tyro.cli(Args, prog="python -m tools.evaluate")
    with command.one_process():
        from tools.evaluate import evaluation

        evaluation.evaluate_run(args)
