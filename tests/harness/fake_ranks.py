"""Many ranks of one process, each a thread with a connection of its own to a real store: what they ask of it."""

import collections
import contextlib
import io
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from common import seal
from common.run import stop

KEY = b"0123456789abcdef"


class Counted:
    """A connection to a store that counts its requests by kind, and the values that they bring."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.timeout = store.timeout
        self.requests: collections.Counter[str] = collections.Counter()
        self.values = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            self.requests[name] += name != "set_timeout"  # which asks nothing
            self.values += len(args[0]) if name == "multi_get" else name == "get"
            return real(*args)

        return counted if callable(real) else real


class Rank(stop.Stop):
    """What `Stop` needs to agree with the others, without signals and a process group."""

    def __init__(self, rank: int, size: int, store: Any, done: int) -> None:
        self.counted = Counted(store)
        self.reason = ""
        self._rank, self._size = rank, size
        self._poll_s = stop.poll_s(size)
        self._last_step = 10**9
        self._lock = threading.Lock()
        self._agreed = threading.Event()
        self._done = self._target = done
        self._store: Any = seal.SealedStore(self.counted, KEY)
        self.agreed_s = 0.0


def agree(size: int) -> tuple[list[Rank], float]:
    """Let so many ranks, which have done a step each, agree on one to stop after; returns them and the seconds."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    ranks = [Rank(rank, size, server.clone(), 100 + rank % 7) for rank in range(size)]
    threads = [threading.Thread(target=rank._agree, args=("a test",), daemon=True) for rank in ranks]
    with contextlib.redirect_stdout(io.StringIO()):  # all of them are rank 0 by their environment, and say so
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return ranks, time.perf_counter() - began
