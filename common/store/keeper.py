"""A run whose checkpoints lie in a store: who may save there, how a checkpoint is committed, what is copied there.

A checkpoint is committed by one request, which writes its manifest. The objects that it names were written before,
under names that no other save has, and nobody reads what no manifest names.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import UserError, manifest, places, ranks
from common.run.process import Process
from common.store import paths, uploads
from common.store.client import ask, words
from common.store.paths import StorePath

LEASE_S = 60.0  # a job that has shown no life for so long has lost its run
NOT_COPIED = {"lock", "checkpoints", "working_folder"}  # of the working folder


class Attempt(StorePath):
    """One try to write a checkpoint, `<checkpoint>/<attempt>`: its files lie in the checkpoint, with names of its own.

    So a checkpoint that a tool has copied is one that everybody can read in a folder.
    """

    def __truediv__(self, name: Any) -> Any:
        """Where a file lies."""
        stem, _, suffix = str(name).rpartition(".")
        return StorePath(f"{self.parent}/{stem}-{self.name}.{suffix}")


class Keeper:
    """What `common.state.disk` is for a folder, and the run's right to save, which one job has at a time.

    Attributes:
        place: the run's folder in the store.
        run_dir: its working folder on this machine: log, records, configuration.
    """

    def __init__(self, place: StorePath, run_dir: Path) -> None:
        """Name the two; ask for nothing yet."""
        self.place, self.run_dir = place, run_dir
        self._files = place.files
        self._lock = str(place / "lock")
        self._text = self._tag = ""  # of the lock, as this job has written it last
        self._lost = ""  # who has taken the run over
        self._ends = threading.Event()
        self._copied: dict[str, tuple[int, int]] = {}  # size and time of what was copied
        self._known: set[str] = set()  # checkpoints that were there, or are this job's
        self._kept = ""  # the newest one, and when
        self._turn = threading.Lock()
        self._rank = ranks.rank()

    # --- The right to save ---

    def claim(self, process: Process) -> None:
        """Keep other jobs out, also of other machines; get the run's records from the store (all ranks).

        Raises:
            UserError: another job has the run, or the store refuses.
        """
        self.run_dir.mkdir(parents=True, exist_ok=True)
        ranks.from_rank0(self._claim, f"--out {self.place.parent}")
        process.background.callback(self.close)
        if self._rank == 0:
            threading.Thread(target=self._show_life, name="store", daemon=True).start()
        ranks.print0(f"checkpoints go to {self.place}; log and records are written in {self.run_dir} and copied there")

    def _claim(self) -> None:
        mine = self.run_dir / "working_folder"  # its lock is held: who had this number before has ended
        if not mine.exists():
            manifest.replace(mine, uuid.uuid4().hex)
        job = f", Slurm job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
        self._about = {
            "owner": f"process {os.getpid()} on {socket.gethostname()}{job}",
            "folder": mine.read_text(),
            "start": uuid.uuid4().hex,
        }
        tag = self._wait_for_silence()[1]
        try:
            self._write_lock(tag)
        except FileExistsError:
            raise UserError(f"--name {self.place.name}: another job has just begun with {self.place}") from None
        self._known = {str(one) for one in (self.place / "checkpoints").iterdir()}
        for name in ("metrics.jsonl", "config.json"):
            if self._known and (self.place / name).is_file():
                manifest.replace(self.run_dir / name, (self.place / name).read_text())

    def _wait_for_silence(self) -> tuple[str, str]:
        """The lock's text and tag, once nobody has the run.

        Time is measured here, from one look to the next: clocks of two machines may differ.
        """
        limit = float(os.environ.get("STORE_LEASE_S", LEASE_S))
        end = time.monotonic() + limit
        text, tag = uploads.read_tagged(self._lock, self._files)
        told = False
        while text:
            try:
                about = json.loads(text)
                owner, folder = str(about["owner"]), str(about["folder"])
            except (ValueError, KeyError, TypeError):
                owner, folder = "another process", ""
            if not owner or folder == self._about["folder"] or time.monotonic() > end:
                break
            if not told:
                ranks.print0(f"{self.place} was held by {owner}: waiting {limit:.0f} s for whether it still runs")
                told = True
            time.sleep(limit / 20)
            now = uploads.read_tagged(self._lock, self._files)
            if now != (text, tag):
                if not now[0] or json.loads(now[0]).get("owner") == "":
                    return now
                raise UserError(
                    f"--name {self.place.name}: {self.place} is in use by {owner}; wait until it ends, or use another "
                    "--name"
                )
        return text, tag

    def _write_lock(self, tag: str, **more: Any) -> None:
        text = json.dumps(self._about | {"beat": uuid.uuid4().hex} | more)
        uploads.put(self._lock, self._files, text, tag)
        self._text, self._tag = text, uploads.read_tagged(self._lock, self._files)[1]

    def _hold(self) -> None:
        """Show that this job lives.

        Raises:
            OSError: another job has taken the run over, or the store is away.
        """
        with self._turn:
            if not self._lost:
                try:
                    self._write_lock(self._tag)
                except FileExistsError:
                    found = uploads.read_tagged(self._lock, self._files)[0]
                    self._lost = json.loads(found or "{}").get("owner") or "another job"
            if self._lost:
                raise OSError(f"{self.place} was taken over by {self._lost}, because this job was silent for so long")

    def _show_life(self) -> None:
        pause = float(os.environ.get("STORE_LEASE_S", LEASE_S)) / 5
        while not self._ends.wait(pause):
            with contextlib.suppress(OSError):  # the next save says it
                self._hold()
                self._copy()

    def close(self) -> None:
        """Copy what is left, and let other jobs have the run."""
        self._ends.set()
        try:
            self._copy()
            if self._rank == 0 and not self._lost:
                with self._turn:
                    self._write_lock(self._tag, owner="")
        except OSError as error:
            sys.stderr.write(f"warning: not all of {self.run_dir} was copied to {self.place}: {words(error)}\n")

    def _copy(self) -> None:
        """Copy files that have changed; each rank its own log, and rank 0 the rest."""
        log = f"rank_{self._rank:05d}.log"
        with self._turn:
            for file in sorted(one for one in self.run_dir.rglob("*") if one.is_file()):
                name = file.relative_to(self.run_dir)
                ours = file.name == log if name.parts[0] == "logs" or self._rank else True
                stamp = file.stat().st_size, file.stat().st_mtime_ns
                if not ours or name.parts[0] in NOT_COPIED or self._copied.get(str(name)) == stamp:
                    continue
                with uploads.Upload(str(self.place / name), self._files) as upload, file.open("rb") as content:
                    while block := content.read(manifest.BLOCK_BYTES):
                        upload.write(block)
                self._copied[str(name)] = stamp

    # --- What common.state.disk has for a folder ---

    def partial(self, final: StorePath) -> Attempt:
        """A name for a checkpoint that is being written."""
        return Attempt(f"{final}/{uuid.uuid4().hex[:8]}")

    def make(self, partial: Attempt, needed: int) -> str:
        """Nothing has to be made, only held (rank 0)."""
        self._hold()
        return str(partial)

    def flush(self, writer: Any) -> None:
        """Nothing: the store has it."""

    def commit(self, partial: Attempt, final: StorePath, facts: dict[str, Any], files: dict[str, Any]) -> None:
        """Write the manifest, if nobody else has (rank 0).

        Raises:
            OSError: another job has taken the run over or committed this step, or the store is away.
        """
        try:
            self._copy()  # before it: who resumes from it finds the records of its steps
        except OSError as error:
            ranks.print0(f"warning: not all of {self.run_dir} was copied to {self.place}: {words(error)}")
        self._hold()
        url = str(final / manifest.NAME)
        _, tag = uploads.read_tagged(url, self._files)
        if tag and str(final) not in self._known:
            raise OSError(f"another job has saved {final} meanwhile")
        try:
            # One that was there is damaged: otherwise this run would have resumed from it.
            uploads.put(url, self._files, manifest.sealed(facts, files), tag)
        except FileExistsError:
            raise OSError(f"another job has saved {final} meanwhile") from None
        self._known.add(str(final))
        self._kept = f"step {facts['step']}, {time.strftime('%H:%M:%S')}"

    def drop(self, partial: Attempt) -> None:
        """Remove what was not committed (rank 0); if the store is away, the next save does."""
        with contextlib.suppress(OSError):
            self._remove(one for one in partial.parent.below() if f"-{partial.name}." in one.name)

    def room(self, _: StorePath) -> str:
        """Since when nothing was kept, for a message."""
        return f"the newest checkpoint there is of {self._kept}" if self._kept else "this job has kept none so far"

    def stamps(self, path: StorePath) -> list[Any]:
        """What changes when a program changes a checkpoint."""
        found = ask(path, "listed", lambda: self._files.find(str(path), detail=True))
        return sorted([name, one["size"], str(one.get("ETag", ""))] for name, one in found.items())

    def replace(self, path: StorePath, text: str) -> None:
        """Write a small object."""
        uploads.put(str(path), self._files, text)

    def tidy(self, final: StorePath, older: Iterable[StorePath]) -> None:
        """Delete older checkpoints, and what saves that were not committed have left (rank 0).

        Raises:
            OSError: one could not be deleted.
        """
        folder = final.parent
        for path in older:
            self._remove([path / manifest.NAME])  # first: without it, the rest is nothing that anybody reads
        everything = folder.below()
        manifests: list[Any] = [one for one in everything if one.name == manifest.NAME]
        kept = {one.parent / name for one in manifests for name in manifest.read_json(one)["files"]} | {*manifests}
        self._remove(one for one in everything if one not in kept and one.parent != folder)
        if hasattr(self._files, "call_s3"):
            bucket, prefix, _ = self._files.split_path(f"{folder}/")
            found = ask(
                folder,
                "asked for unfinished uploads",
                lambda: self._files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix),
            )
            for one in found.get("Uploads", []):
                if one["Key"].startswith(prefix):
                    with contextlib.suppress(FileNotFoundError):
                        self._files.call_s3(
                            "abort_multipart_upload", Bucket=bucket, Key=one["Key"], UploadId=one["UploadId"]
                        )

    def _remove(self, objects: Iterable[StorePath]) -> None:
        for path in objects:
            with contextlib.suppress(FileNotFoundError):
                ask(path, "deleted", lambda path=path: self._files.rm_file(str(path)))  # type: ignore[misc]


def choose(out: str, name: str) -> Keeper:
    """The run's folder in a store, and its working folder in runs/ on this machine (all ranks).

    Raises:
        UserError: as `paths.parse` and `places.choose`.
    """
    place = paths.parse("--out", out)
    working = Path("runs", *(part.rstrip(":") for part in place.parts))
    return Keeper(place / name, Path(ranks.from_rank0(lambda: str(places.choose(str(working), name)))))


def find(out: str, name: str) -> tuple[Any, Any, Any]:
    """A run's folder on this machine, where its checkpoints lie, and what keeps them there, None for the folder.

    All ranks take part.

    Raises:
        UserError: the folder cannot be used.
    """
    if paths.is_url(out):
        keeper = choose(out, name)
        return keeper.run_dir, keeper.place, keeper
    run_dir = Path(ranks.from_rank0(lambda: str(places.choose(out, name))))
    return run_dir, run_dir, None
