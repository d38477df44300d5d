"""One rank of Brigade's recipe in benchmarks/peers.py, with the clock of the other loops (peer_loops.py).

The launcher runs it with the arguments WORKLOAD STEPS SEED GIVEN FOLDER [FLAGS of the recipe].
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from benchmarks import peer_loops
from common import session
from tests.harness import runner
from tests.harness.runner import ROOT
from torch import nn


def main() -> None:
    """Train once: the recipe, which also evaluates and saves at its end."""
    workload, steps, seed, given, folder, *flags = sys.argv[1:]
    what = peer_loops.WORKLOADS[workload]
    real = session.Session.steps
    trained: list[nn.Module] = []
    clocks: list[peer_loops.Clock] = []

    def ticking(run: session.Session, dp_rank: int) -> Iterator[int]:
        began = time.time(), time.process_time()
        model = cast(nn.Module, run._model.module)
        start = torch.load(Path(given, "start.pt"), weights_only=True)
        for name, value in model.state_dict().items():  # or this would be another training
            torch.testing.assert_close(value, start[name], rtol=0, atol=0)
        trained[:] = [model]
        clocks[:] = [clock := peer_loops.Clock(peer_loops.read(what, Path(given), "held_out"))]
        clock.paused = (time.time() - began[0], time.process_time() - began[1])
        judged = peer_loops.WithLoss(model, what)
        for step in real(run, dp_rank):
            yield step
            clock.tick(judged)

    session.Session.steps = ticking  # type: ignore[method-assign,assignment]
    never = ("--eval-every", "1000000", "--save-every", "1000000")
    where = ("--out", str(Path(folder, "runs")), "--name", "run", "--seed", seed, "--max-steps", steps)
    path = str(ROOT / "recipes" / what.recipe / "train.py")
    runner.run_path(path, [path, *where, *never, *what.flags, *flags])
    peer_loops.leave(folder, trained[0], clocks[0], {})


if __name__ == "__main__":
    main()
