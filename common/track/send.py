"""The process that sends a run's records to its tracker: `python send.py NAME RUN`, which `tracker.start` runs.

It reads metrics.jsonl as it grows. tracker.json in the run's folder says by which id the tracker knows the run, and
which record was the last one that it got: so a run that continues is one run there, a record that was not sent is sent
later, and none is sent twice. A tracker that fails is asked again, and ends nothing.

The end of its standard input is the end of the run, or of the process that trains.
"""

import contextlib
import fcntl
import itertools
import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import manifest, printable
from common.run import output
from common.track import services

POLL_S = 1.0  # between two looks at the records
MOST_S = 60.0  # while the tracker fails, at most
Record = tuple[tuple[int, int], dict[str, float]]  # (step, how many of that step so far), numbers by tag


class Tail:
    """metrics.jsonl, while it grows."""

    def __init__(self, file: Path) -> None:
        """Begin with its first line."""
        self._file = file
        self._end = 0
        self._key = (-1, 0)

    def read(self) -> Iterator[Record]:
        """The records since the last call, without damaged lines and one that is being written."""
        if not self._file.exists():
            return
        if self._file.stat().st_size < self._end:  # it was cut off
            self._end = 0
            self._key = (-1, 0)
        with self._file.open("rb") as lines:
            lines.seek(self._end)
            for line in lines:
                if not line.endswith(b"\n"):
                    return
                self._end += len(line)
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                    values = json.loads(line)
                    step = int(values.pop("step"))
                    numbers = {tag: math.nan if value is None else float(value) for tag, value in values.items()}
                    self._key = (step, self._key[1] + 1 if step == self._key[0] else 1)
                    yield self._key, numbers


class Sender:
    """Sends the records of one run.

    Attributes:
        left: records that are not sent.
        error: why the tracker does not take them; "" while all is well.
    """

    def __init__(self, name: str, run: Path, say: Callable[[str, bool], None]) -> None:
        """Read how far an earlier process came.

        Args:
            name: of the tracker.
            run: the folder of the run.
            say: prints a line, and takes whether it is a warning.
        """
        self.left: list[Record] = []
        self.error = ""
        self._name = name
        self._run = run
        self._say = say
        self._tail = Tail(run / "metrics.jsonl")
        self._service: Any = None
        known = self._read().get(name, {"id": "", "sent": (-1, 0)})
        self._id = known["id"]
        self._sent = tuple(known["sent"])

    def follow(self, ended: threading.Event) -> None:
        """Send records until the run has ended and there are no more, or the tracker does not take the last ones."""
        pause = POLL_S
        warned = last = False
        while not last:
            last = ended.is_set()
            try:
                self._send()
                self.error = ""
                pause = POLL_S
            except Exception as error:  # whatever a tracker raises
                self.error = words(error)
                pause = min(2 * pause, MOST_S)
                if not warned:
                    warned = True
                    self._say(f"warning: --tracker {self._name} fails, which ends no training: {self.error}", True)
            if not last:
                ended.wait(pause)

    def _send(self) -> None:
        self.left += [record for record in self._tail.read() if record[0] > self._sent]
        if not self._service:
            self._service = services.find(self._name)(self._about())
            self._id = self._service.id
            self._keep()
            self._say(f"tracker  {self._name}: {without_secrets(self._service.where)}", False)
        before = self._sent
        for step, group in itertools.groupby(tuple(self.left), key=lambda record: record[0][0]):
            records = [*group]
            self._service.log(step, {tag: value for _, values in records for tag, value in values.items()})
            del self.left[: len(records)]
            self._sent = records[-1][0]
        if self._sent != before:
            self._keep()

    def _about(self) -> services.About:
        config = json.loads((self._run / "config.json").read_text())
        config |= config.pop("args")
        del config["code"]
        return services.About(config["recipe"], self._run.name, config, self._id)

    def _read(self) -> dict[str, Any]:
        """What tracker.json says: of each tracker that the run has had, id and sent."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self._run / "tracker.json").read_text())
        return {}

    def _keep(self) -> None:
        known = self._read() | {self._name: {"id": self._id, "sent": self._sent}}
        manifest.replace(self._run / "tracker.json", json.dumps(known))

    def finish(self, done: bool) -> None:
        """End the run in the tracker."""
        try:
            if self._service:
                self._service.finish(done)
        except Exception as error:
            self.error = words(error)
        if self.error:
            self.say_left(self.error)

    def say_left(self, why: str) -> None:
        """Say what the tracker lacks."""
        lacks = f"{self._name} lacks {len(self.left)} records" if self.left else f"{self._name} may lack records"
        self._say(f"warning: {lacks} of this run, which the same command sends later: {why}", True)


def words(error: BaseException) -> str:
    """An error in one line, without what the environment keeps secret."""
    return without_secrets(" ".join(f"{type(error).__name__}: {error}".split()))[:500]


def without_secrets(text: str) -> str:
    """A text without the values of secret variables, users and passwords of URLs, and their queries."""
    for name, value in os.environ.items():
        if re.search("SECRET|TOKEN|PASSWORD|_KEY", name) and len(value) > 5:
            text = text.replace(value, f"${name}")
    return printable(re.sub(r"\?\S*", "?...", re.sub(r"//[^/\s]*@", "//", text)))


def main(name: str, run: Path) -> None:
    """Send until the standard input ends, and then what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the ranks save first
    terminal = os.dup(1), os.dup(2)

    def say(text: str, warns: bool) -> None:
        clear = "\r\x1b[K" if os.isatty(terminal[warns]) else ""  # of a progress bar
        with contextlib.suppress(OSError):
            os.write(terminal[warns], f"{clear}{text}\n".encode())

    log = run / services.LOG
    log.parent.mkdir(exist_ok=True)
    printed = output.append_to(log)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.lockf(printed, fcntl.LOCK_EX)  # a process of an earlier start may still be sending, for a limited time
    os.dup2(printed.fileno(), 1)
    os.dup2(printed.fileno(), 2)
    sender = Sender(name, run, say)
    ended = threading.Event()
    done: list[bool] = []

    def wait() -> None:
        done.append(sys.stdin.buffer.read() == services.DONE)
        if not done[0]:  # the process that trains is gone: hold nobody's pipe open
            for number in terminal:
                os.dup2(printed.fileno(), number)
        ended.set()
        time.sleep(services.wait_s())
        sender.say_left(f"it has not answered for {services.wait_s():g} s")
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
    sender.follow(ended)
    sender.finish(done[0])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
