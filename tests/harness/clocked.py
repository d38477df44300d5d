"""Cases in another process, one after the other, with a clock for each: one that hangs is killed and named."""

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

from tests.harness import runner  # noqa: F401  # sets up the fork server

FORKS = multiprocessing.get_context("forkserver")


def run(target: Callable[[Any], str], cases: list[Any], limit_s: float) -> list[str]:
    """What `target` returns of each case; of one that takes longer than `limit_s` or ends the process, that it did."""
    found: list[str] = []
    while len(found) < len(cases):
        ours, theirs = FORKS.Pipe()
        process = FORKS.Process(target=_serve, args=(target, cases[len(found) :], theirs))
        process.start()
        theirs.close()
        fault = ""
        try:
            while len(found) < len(cases) and not fault:
                if ours.poll(limit_s):
                    found.append(ours.recv())
                else:
                    fault = f"FAULT hangs: more than {limit_s} s"
        except EOFError:
            process.join(10)
            fault = f"FAULT the process ended with {process.exitcode}"
        if fault:
            found.append(fault)
        process.kill()
        process.join()
    return found


def _serve(target: Callable[[Any], str], cases: list[Any], connection: Any) -> None:
    for case in cases:
        connection.send(target(case))
    connection.close()
    time.sleep(60)  # the parent kills this process, whatever its threads do
