"""Time stamps of a training step, for a copy of a recipe that imports this: what computes and what sends, and when.

`watch()` wraps torch's functions in place. When the process ends, the spans of the last step are in the file whose name
is TIMELINE and the rank: [["backward", begin, end], ...], seconds of the machine's clock. It begins with "forward",
whose end is the first backward pass.
"""

import atexit
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

spans: list[tuple[str, float, float]] = []


def note(name: str, began: float) -> None:
    """Add what ends now."""
    spans.append((name, began, time.time()))


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with a note of each call; of an asynchronous one, until its work is done."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        began = time.time()
        result = function(*args, **kwargs)
        if kwargs.get("async_op"):
            result.get_future().add_done_callback(lambda _: note(name, began))
        else:
            note(name, began)
        return result

    return wrapped


class TimedWork:
    """Messages that two ranks exchange, until they have arrived."""

    def __init__(self, work: Any, began: float) -> None:
        """Wrap what batch_isend_irecv returns."""
        self._work = work
        self._began = began

    def wait(self) -> None:
        """Wait, and note it."""
        self._work.wait()
        note("sending", self._began)


def watch() -> None:
    """Wrap torch's functions, before anything calls them."""
    for name in ("all_reduce", "send", "recv"):
        setattr(dist, name, timed("sending", getattr(dist, name)))
    exchange = dist.batch_isend_irecv

    def exchanged(messages: list[Any]) -> list[TimedWork]:
        began = time.time()
        return [TimedWork(work, began) for work in exchange(messages)]

    dist.batch_isend_irecv = exchanged  # type: ignore[assignment]
    torch.Tensor.backward = timed("backward", torch.Tensor.backward)  # type: ignore[method-assign]
    torch.optim.SGD.step = timed("update", torch.optim.SGD.step)  # type: ignore[method-assign]
    atexit.register(write)


def write() -> None:
    """Write the last whole step."""
    ends = [end for name, _, end in spans if name == "update"]
    last = [("forward", ends[-2], 0.0), *(span for span in spans if ends[-2] <= span[1] <= ends[-1])]
    Path(os.environ["TIMELINE"] + os.environ["RANK"]).write_text(json.dumps(last))
