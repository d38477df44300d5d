"""Rows of the fault matrix on runs in an object store: what a store shows a row in a folder, and how faults get there.

A row (tests/faults) looks at a run's folder, damages it and starts the run again. Here this folder mirrors the run's
objects: what a row has changed in it goes to the store before a start, and what lies there comes back after it.
"""

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import manifest
from common.store.objects import keeper, uploads
from common.store.objects.paths import StorePath

from tests.harness import inject, runner
from tests.store import server

PART_BYTES = 200  # so that the files of small models, too, travel in several parts


@dataclass
class Mirror:
    """Objects below a prefix, and a folder with the same content.

    Attributes:
        store: where they lie.
        prefix: of the objects.
        folder: of the files.
        machine: the folder in which ranks run, and have their working folders.
    """

    store: server.Server
    prefix: str
    folder: Path
    machine: Path
    _seen: dict[str, str] = field(default_factory=dict)  # digests of the files, after the last pull
    _turn: Any = field(default_factory=threading.Lock)

    def spawn(self, target: Callable[..., None], args: Sequence[tuple[Any, ...]], *more: Any) -> runner.Result:
        """`runner.spawn` on a machine with the store, whose objects are then those of the folder, and back."""
        with self._turn:
            self.push()
        self.machine.mkdir(exist_ok=True)
        env = {**self.store.env, "STORE_RETRY_S": "0.5", "STORE_LEASE_S": "1"}
        ranks = [(str(self.machine), env, target, *one) for one in args]
        result = runner.spawn(run, ranks, *more)
        with self._turn:
            self.pull()
            if result.ok:
                self.check_tidy()
        return result

    def push(self) -> None:
        """Let the objects be what the files are, if somebody has changed these."""
        client = self.store.client()
        found = self._digests()
        for name in self._seen.keys() - found.keys():
            client.delete_object(Bucket=server.BUCKET, Key=f"{self.prefix}/{name}")
        for name in found:
            if found[name] != self._seen.get(name):
                content = (self.folder / name).read_bytes()
                client.put_object(Bucket=server.BUCKET, Key=f"{self.prefix}/{name}", Body=content)
        self._seen = found

    def pull(self) -> None:
        """Let the files be what the objects are."""
        shutil.rmtree(self.folder, ignore_errors=True)
        client = self.store.client()
        for key in self.store.objects(f"{self.prefix}/"):
            file = self.folder / key.removeprefix(f"{self.prefix}/")
            if file.name != "lock":
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(client.get_object(Bucket=server.BUCKET, Key=key)["Body"].read())
        # What only this machine has: the note to its launcher, and logs of ranks that had no time to copy them.
        working = self.machine / "runs" / "s3" / server.BUCKET / self.prefix
        for file in [*working.glob("stopped.json"), *working.glob("logs/*")]:
            copy = self.folder / file.relative_to(working)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
        self._seen = self._digests()

    def _digests(self) -> dict[str, str]:
        files = [file for file in self.folder.rglob("*") if file.is_file()]
        return {str(file.relative_to(self.folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    def check_tidy(self) -> None:
        """After a save that has ended: every file of tensors is named, and no upload is unfinished."""
        for file in self.folder.rglob("*.safetensors"):
            assert file.name in json.loads((file.parent / manifest.NAME).read_text())["files"], file
        assert not [key for key in self.store.uploads() if key.startswith(f"{self.prefix}/")]


def run(machine: str, env: dict[str, str], target: Callable[..., None], *args: Any) -> None:
    """Run a rank on a machine with the store, with the points of a save that inject.py finds in a folder."""
    os.environ |= env
    uploads.PART_BYTES = PART_BYTES
    add_points()
    with contextlib.chdir(machine):
        target(*args)


def add_points() -> None:
    """What is done to files in a folder, and to objects here.

    patched                     what for
    Upload._part                point "in a file": one part of it has been sent, and the upload is not finished
    uploads.put of a manifest   points "before the rename", "after the rename": this request commits
    Keeper.claim, Keeper.commit points "before the claim" and "before the manifest"
    Keeper._remove              point "during retention": the oldest manifest is gone, and its files are there
    """
    part, put, remove = uploads.Upload._part, uploads.put, keeper.Keeper._remove

    def put_manifest(url: str, *more: Any) -> str:
        commits = url.endswith(f"/{manifest.NAME}")
        if commits:
            inject._reach("before the rename")
        tag = put(url, *more)
        if commits:
            inject._reach("after the rename")
        return tag

    def send_part(self: Any, number: int, content: bytearray) -> dict[str, Any]:
        sent = part(self, number, content)
        if "/checkpoints/" in self._url:  # and no log
            inject._reach("in a file")
        return sent

    def remove_objects(self: Any, objects: Any) -> None:
        listed: list[StorePath] = [*objects]
        remove(self, listed)
        if [one.name for one in listed] == [manifest.NAME]:
            inject._reach("during retention")

    uploads.put = put_manifest  # type: ignore[assignment]
    uploads.Upload._part = send_part  # type: ignore[method-assign]
    keeper.Keeper._remove = remove_objects  # type: ignore[method-assign]
    inject._before(keeper.Keeper, "claim", inject._reaches("before the claim"))
    inject._before(keeper.Keeper, "commit", inject._reaches("before the manifest"))
    for action in ("die in a file", "die in a deletion"):  # it is half there already
        inject.ACTIONS[action] = lambda _: inject._send("SIGKILL")
