"""The right to save in a run of a store, which one job has at a time: its owner writes an object again and again."""

import json
import os
import socket
import threading
import time
import uuid
from typing import Any

from common import UserError, ranks
from common.store.objects import uploads
from common.store.objects.paths import StorePath

LEASE_S = 60.0


def lease_s() -> float:
    """Seconds of silence after which a job has lost its run."""
    return float(os.environ.get("STORE_LEASE_S", LEASE_S))


class Lease:
    """This job's hold on a run.

    Attributes:
        lost: who has taken the run over; "" for nobody.
        heeds: whether the store was seen to heed conditions of what is written.
    """

    def __init__(self, path: StorePath) -> None:
        """Name the run; ask for nothing yet."""
        self.lost = ""
        self.heeds = False
        self._path = path
        self._lock = str(path / "lock")
        self._tag = ""  # of the lock, as this job has written it last
        self._turn = threading.Lock()
        self._about: dict[str, str] = {}

    def take(self, folder: str) -> None:
        """Get the run, once nobody else shows life; `folder` is the number of this job's working folder.

        Raises:
            UserError: another job has it.
        """
        job = f", Slurm job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
        self._about = {
            "owner": f"process {os.getpid()} on {socket.gethostname()}{job}",
            "folder": folder,
            "start": uuid.uuid4().hex,
        }
        try:
            self._write(self._wait_for_silence())
        except FileExistsError:  # it has shown life, or begun, since the last look
            raise self._in_use(uploads.read_tagged(self._lock, self._path.files)[0]) from None
        self.heeds = uploads.heeds_conditions(self._lock, self._path.files)
        if not self.heeds:
            ranks.print0(
                f"note: {self._path} has no conditional writes (If-None-Match, If-Match): two jobs that begin at the "
                "same moment with one --name may both train"
            )

    def _wait_for_silence(self) -> str:
        """The lock's tag, once nobody has the run.

        Time is measured here, from one look to the next: clocks of two machines may differ.
        """
        end = time.monotonic() + lease_s()
        text, tag = uploads.read_tagged(self._lock, self._path.files)
        told = False
        while text:
            owner, folder = _holder(text)
            if not owner or folder == self._about["folder"] or time.monotonic() > end:
                break
            if not told:
                ranks.print0(f"{self._path} was held by {owner}: waiting {lease_s():.0f} s for whether it still runs")
                told = True
            time.sleep(lease_s() / 20)
            found, now = uploads.read_tagged(self._lock, self._path.files)
            if now != tag:
                if not found or not _holder(found)[0]:
                    return now
                raise self._in_use(found)
        return tag

    def _in_use(self, text: str) -> UserError:
        return UserError(
            f"--name {self._path.name}: {self._path} is in use by {_holder(text)[0]}; wait until it ends, or use "
            "another --name"
        )

    def _write(self, tag: str, **more: Any) -> None:
        text = json.dumps(self._about | {"beat": uuid.uuid4().hex} | more)
        self._tag = uploads.put(self._lock, self._path.files, text, tag, self.heeds)

    def hold(self) -> None:
        """Show that this job lives.

        Raises:
            OSError: another job has taken the run over, or the store is away.
        """
        with self._turn:
            if not self.lost:
                try:
                    self._write(self._tag)
                except FileExistsError:
                    text, tag = uploads.read_tagged(self._lock, self._path.files)
                    if self._about["start"] in text:  # it is what this job has written, and the answer was lost
                        self._write(tag)
                    else:
                        self.lost = _holder(text)[0] or "another job"
            if self.lost:
                raise OSError(f"{self._path} was taken over by {self.lost}, because this job was silent for so long")

    def release(self) -> None:
        """Let other jobs have the run at once.

        Raises:
            OSError: the store is away.
        """
        with self._turn:
            if not self.lost:
                self._write(self._tag, owner="")


def _holder(text: str) -> tuple[str, str]:
    """Who holds a lock of this text, "" for nobody, and that job's working folder, "" if it is not known."""
    try:
        about = json.loads(text)
        return str(about["owner"]), str(about["folder"])
    except (ValueError, KeyError, TypeError):
        return "another process", ""
