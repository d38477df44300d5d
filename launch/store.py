"""The launchers' sealed store: torch's own code waits in it, and it puts back what a stranger deletes."""

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from common import seal

POLL_S = 0.05


class WaitingStore(seal.SealedStore, dist.Store):
    """A sealed store for code that takes a torch.distributed.Store, also through a PrefixStore."""

    timeout: timedelta  # of torch's class, which also sets it through a PrefixStore

    def __init__(self, store: Any, key: bytes) -> None:  # a dist.Store, whose stubs lack bytes and the timeout
        dist.Store.__init__(self)
        super().__init__(store, key)
        self._seen: dict[str, bytes] = {}  # the newest sealed value that `get` has found
        self.set_timeout(self._store.timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` and `wait` wait."""
        dist.Store.set_timeout(self, timeout)
        self._store.set_timeout(timeout)

    def get(self, name: str) -> bytes:
        """Wait for a value; a known one is put back where a stranger has deleted or replaced it.

        Raises:
            DistStoreError: none came within the store's timeout.
        """
        end = time.monotonic() + self.timeout.total_seconds()
        while True:
            seen = self._seen.get(name)
            if seen is None:
                self._store.wait([name], self.timeout)
            sealed = self._store.get(name) if seen is None else self._store.compare_set(name, b"", seen)
            if (value := self._open(name, sealed)) is not None:
                self._seen[name] = sealed
                return value
            if seen is not None:
                self._store.compare_set(name, sealed, seen)
            elif time.monotonic() > end:
                raise dist.DistStoreError(f"only foreign values of {name} came in {self.timeout}")
            else:
                time.sleep(POLL_S)

    def wait(self, names: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all these names have values, foreign ones included."""
        self._store.wait(names, timeout or self.timeout)
