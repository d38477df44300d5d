"""A run whose checkpoints lie in a store: who may save there, how a checkpoint is committed, what is copied there.

A checkpoint is committed by one request, which writes its manifest. The objects that it names were written before,
under names that no other save has, and nobody reads what no manifest names.
"""

import contextlib
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from common import manifest, ranks
from common.run import log, run_dir
from common.run.process import Process
from common.store import disk
from common.store.objects import lease, uploads
from common.store.objects.client import ask, words
from common.store.objects.paths import StorePath

# Of the working folder: what is of this machine, as is the note to its launcher that the run was asked to stop.
NOT_COPIED = {"lock", "checkpoints", "working_folder", log.STOPPED}


class Attempt(StorePath):
    """One try to write a checkpoint, `<checkpoint>/<attempt>`: its files lie in the checkpoint, with names of its own.

    So a checkpoint that a tool has copied is one that everybody can read in a folder.
    """

    def __truediv__(self, name: Any) -> Any:
        """Where a file lies."""
        stem, _, suffix = str(name).rpartition(".")
        return StorePath(f"{self.parent}/{stem}-{self.name}.{suffix}")


class Keeper:
    """What `common.store.disk.Disk` is for a folder, and the run's right to save, which one job has at a time.

    Attributes:
        path: the run's folder in the store.
        run_dir: its working folder on this machine: log, records, configuration.
        spare: where the last checkpoint goes if the store does not take it: the working folder.
    """

    def __init__(self, path: StorePath, working: Path) -> None:
        """Name the two; ask for nothing yet."""
        self.path = path
        self.run_dir = working
        self.spare = disk.Disk(working)
        self._files = path.files
        self._lease = lease.Lease(path)
        self._ends = threading.Event()
        self._copied: dict[str, tuple[int, int]] = {}  # size and time of what was copied
        self._known: set[str] = set()  # checkpoints that were there, or are this job's
        self._kept = ""  # the newest one, and when
        self._copying = threading.Lock()
        self._rank = ranks.rank()

    @property
    def lost(self) -> str:
        """Who has taken the run over; "" for nobody. Only rank 0 knows."""
        return self._lease.lost

    # --- The right to save ---

    def claim(self, process: Process) -> None:
        """Keep other jobs out, also of other machines; get the run's records from the store (all ranks).

        Raises:
            UserError: another job has the run, or the store refuses.
        """
        run_dir.take(self.run_dir, process)
        self.run_dir.mkdir(parents=True, exist_ok=True)  # on each machine
        ranks.from_rank0(self._claim, f"--out {self.path.parent}")
        process.background.callback(self.close)
        if self._rank == 0:
            for call in (self._lease.hold, self._copy):  # side by side: copying a large file must not cost the lease
                threading.Thread(target=self._again, args=(call,), name=call.__name__, daemon=True).start()
        ranks.print0(f"checkpoints go to {self.path}; log and records are written in {self.run_dir} and copied there")
        if (store := self.path.parts[0]) in ("gs:", "az:"):
            ranks.print0(f"note: {store}// was tried on an emulator only (docs/checkpoints.md): try a resume early")

    def _claim(self) -> None:
        mine = self.run_dir / "working_folder"  # its lock is held: who had this number before has ended
        if not mine.exists():
            manifest.replace(mine, uuid.uuid4().hex)
        self._lease.take(mine.read_text())
        if not uploads.abort_unfinished(self.path, self._files):  # of killed jobs: logs, too
            ranks.print0(
                f"note: unfinished uploads to {self.path} cannot be listed: what killed saves leave of them stays "
                "there and costs, unless rules of the store remove it"
            )
        self._known = {str(one) for one in (self.path / "checkpoints").iterdir()}
        for name in ("metrics.jsonl", "config.json", "tracker.json"):
            if self._known and (self.path / name).is_file():
                manifest.replace(self.run_dir / name, (self.path / name).read_bytes())

    def _again(self, call: Callable[[], None]) -> None:
        while not self._ends.wait(lease.lease_s() / 5):
            with contextlib.suppress(OSError):  # the next save says it
                call()

    def close(self) -> None:
        """Copy what is left, and let other jobs have the run."""
        self._ends.set()
        try:
            self._copy()
            if self._rank == 0:
                self._lease.release()
        except OSError as error:
            sys.stderr.write(f"warning: not all of {self.run_dir} was copied to {self.path}: {words(error)}\n")

    def _copy(self) -> None:
        """Copy files that have changed; each rank its own log, and rank 0 the rest."""
        mine = f"rank_{self._rank:05d}.log"
        if self.lost:
            return  # these are the other job's files now
        with self._copying:
            for file in sorted(one for one in self.run_dir.rglob("*") if one.is_file()):
                name = file.relative_to(self.run_dir)
                ours = file.name == mine if name.parts[0] == "logs" or self._rank else True
                stamp = file.stat().st_size, file.stat().st_mtime_ns
                if not ours or name.parts[0] in NOT_COPIED or self._copied.get(str(name)) == stamp:
                    continue
                with uploads.Upload(str(self.path / name), self._files) as upload, file.open("rb") as content:
                    while block := content.read(manifest.BLOCK_BYTES):
                        upload.write(block)
                self._copied[str(name)] = stamp

    # --- What a Disk has ---

    def make(self, final: StorePath, needed: int) -> str:
        """A name for a checkpoint that is being written, once this job was seen to have the run (rank 0).

        Raises:
            OSError: another job has taken the run over, or the store is away.
        """
        self._lease.hold()
        return f"{final}/{uuid.uuid4().hex[:8]}"

    def partial(self, named: str) -> Attempt:
        """What `make` has named, on any rank."""
        return Attempt(named)

    def flush(self, file: StorePath) -> None:
        """Nothing: the store has it."""

    def commit(self, partial: Attempt, final: StorePath, facts: dict[str, Any], files: dict[str, Any]) -> None:
        """Write the manifest, if nobody else has (rank 0).

        Raises:
            OSError: another job has taken the run over or committed this step, a file is gone, or the store is away.
        """
        try:
            self._copy()  # before it: who resumes from it finds the records of its steps
        except OSError as error:
            ranks.print0(f"warning: not all of {self.run_dir} was copied to {self.path}: {words(error)}")
        self._lease.hold()
        self._look_at(final, files)
        url = str(final / manifest.NAME)
        tag = uploads.tag_of(url, self._files)
        if tag and str(final) not in self._known:
            raise OSError(f"another job has saved {final} meanwhile")
        try:
            # One that was there is damaged: otherwise this run would have resumed from it.
            uploads.put(url, self._files, manifest.text(facts, files), tag, self._lease.heeds)
        except FileExistsError:
            raise OSError(f"another job has saved {final} meanwhile") from None
        self._known.add(str(final))
        try:
            self._lease.hold()  # who stood still between the two for longer than the lease takes its manifest back
        except OSError:
            self._remove([final / manifest.NAME])
            raise
        self._kept = f"step {facts['step']}, {time.strftime('%H:%M:%S')}"

    def _look_at(self, final: StorePath, files: dict[str, Any]) -> None:
        """See that all files of a checkpoint are there, with their sizes: the store has compared their digests.

        Raises:
            OSError: one is not.
        """
        found = {Path(name).name: size for name, size, _ in self.stamps(final)}
        for name, entry in files.items():
            if found.get(name) != entry["bytes"]:
                raise OSError(f"{final / name} was written, and has {found.get(name, 'no')} bytes now")

    def drop(self, partial: Attempt) -> None:
        """Remove what was not committed (rank 0); if the store is away, the next save does."""
        with contextlib.suppress(OSError):
            self._remove(one for one in partial.parent.below() if f"-{partial.name}." in one.name)

    def room(self) -> str:
        """Since when nothing was kept, for a message."""
        return f"the newest checkpoint there is of {self._kept}" if self._kept else "this job has kept none so far"

    def stamps(self, path: StorePath) -> list[Any]:
        """What changes when a program changes a checkpoint."""
        found = ask(path, "listed", lambda: self._files.find(str(path), detail=True))
        return sorted([name, one["size"], str(one.get("ETag", ""))] for name, one in found.items())

    def tidy(self, final: StorePath, pointers: Mapping[str, str], older: Iterable[StorePath]) -> None:
        """Write small objects beside a checkpoint, delete older ones and what killed saves have left (rank 0).

        Raises:
            OSError: one could not be written or deleted, or another job has taken the run over.
        """
        folder = final.parent
        for name, text in pointers.items():
            uploads.put(str(folder / name), self._files, text)
        self._lease.hold()  # what another job is writing is no abandoned upload
        for path in older:
            self._remove([path / manifest.NAME])  # first: without it, the rest is nothing that anybody reads
        everything = folder.below()
        manifests: list[Any] = [one for one in everything if one.name == manifest.NAME]
        kept = {*manifests}
        for one in manifests:
            try:
                kept |= {one.parent / name for name in manifest.read_json(one)["files"]}
            except (ValueError, KeyError, TypeError):  # it is damaged: nobody knows what it names
                kept |= {file for file in everything if file.parent == one.parent}
        self._remove(one for one in everything if one not in kept and one.parent != folder)
        uploads.abort_unfinished(folder, self._files)

    def _remove(self, objects: Iterable[StorePath]) -> None:
        for path in objects:
            with contextlib.suppress(FileNotFoundError):
                ask(path, "deleted", lambda path=path: self._files.rm_file(str(path)))  # type: ignore[misc]
