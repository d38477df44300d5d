"""The tracker of a run, which a process of its own feeds: nothing that happens there can hold the training up.

That process reads metrics.jsonl, the queue between the two, which nobody has to drop anything from; see `send`.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from common import ranks
from common.run.process import Process, World
from common.track import services

SEND = Path(__file__).with_name("send.py")


@dataclass(frozen=True)
class TrackArgs:
    """Flags of trackers."""

    # every run
    tracker: str = ""  # also send all records to wandb, mlflow, trackio, or one that your package adds; "" for none


def check(name: str) -> None:
    """Look for a tracker where it will be needed, on rank 0 (all ranks).

    Raises:
        UserError: nobody knows it, or its package is not installed.
    """
    if name:
        ranks.from_rank0(lambda: services.check(name), f"--tracker {name}")


def start(name: str, run: Path, world: World) -> None:
    """Begin to send a run's records, or continue (rank 0). It ends with this process, or when the run ends.

    Args:
        name: of the tracker; "" for none.
        run: the folder of the run, with config.json, and metrics.jsonl without the steps that are repeated.
        world: this process.
    """
    if not name or world.rank != 0:
        return
    # It sees the packages that this process sees. RUN_KEY, which is not for it, has left the environment before.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        sender = subprocess.Popen(  # noqa: S603 (this program, by its path)
            [sys.executable, "-P", str(SEND), name, str(run)],  # -P: what lies beside it are no packages
            env=env,
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the ranks, which say when it ends
        )
    except OSError as error:
        ranks.print0(f"warning: --tracker {name} gets nothing, because no process can be started: {error}")
    else:
        world.process.background.callback(end, name, run, sender, world.process)


def end(name: str, run: Path, sender: "subprocess.Popen[bytes]", process: Process) -> None:
    """Let the sending process send what is left, for a limited time."""
    if process.watch:  # which would take this for a hang
        process.watch.close()
    try:
        sender.communicate(services.DONE, timeout=services.wait_s() + services.GRACE_S)
    except subprocess.TimeoutExpired:
        sender.kill()
    if sender.wait():
        ranks.print0(f"warning: what sends to {name} has failed, see {run / services.LOG}")
