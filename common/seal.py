"""Sealed values in a store without a password: a value that a stranger writes counts as absent. A leaf.

Who reaches a TCPStore's port can read, write and delete every key. So each value carries an HMAC-SHA256 of its name and
itself, under a key that only the run knows: it cannot be forged, nor moved to another name or to another start.
"""

import hashlib
import hmac
from typing import Any, Self

MAC_BYTES = 32
Value = str | bytes


def derive(key: str, purpose: str) -> bytes:
    """A key for one purpose, such as one start of the ranks."""
    return hmac.digest(key.encode(), purpose.encode(), "sha256")


def close(key: bytes, name: str, value: Value) -> bytes:
    """A value with the seal of its name."""
    content = value.encode() if isinstance(value, str) else value
    return hmac.digest(key, hashlib.sha256(name.encode()).digest() + content, "sha256") + content


def unseal(key: bytes, name: str, sealed: bytes) -> bytes | None:
    """The value of this name; None if its seal is of another key or name, or missing."""
    content = sealed[MAC_BYTES:]
    return content if hmac.compare_digest(close(key, name, content), sealed) else None


class SealedStore:
    """A store whose values are sealed. Nobody waits in it. Counters (`add`) are not sealed: they decide nothing.

    Attributes:
        foreign: the first name under which a value of a stranger was found; "" while there was none.
    """

    def __init__(self, store: Any, key: bytes) -> None:  # a dist.Store, whose stubs lack bytes
        self._store = store
        self._key = key
        self.foreign = ""

    def clone(self) -> Self:
        """The same store over a connection of its own, for another thread."""
        return type(self)(self._store.clone(), self._key)

    def set(self, name: str, value: Value) -> None:
        """Write a value."""
        self._store.set(name, close(self._key, name, value))

    def peek(self, name: str) -> str:
        """The value as text, without waiting; "" if there is none, or a foreign one."""
        return (self._open(name, self._store.get(name)) or b"").decode() if self._store.check([name]) else ""

    def peek_all(self, names: list[str]) -> list[str]:
        """`peek` of each in two requests; "" for all while one is missing."""
        if not self._store.check(names):
            return [""] * len(names)
        found = self._store.multi_get(names)
        return [(self._open(name, sealed) or b"").decode() for name, sealed in zip(names, found, strict=True)]

    def compare_set(self, name: str, expected: Value, desired: Value) -> bytes:
        """Write a value if the present one is the expected one, "" for none; a foreign one counts as the expected one.

        Returns:
            The value that is there afterwards.
        """
        new = close(self._key, name, desired)
        old = close(self._key, name, expected) if expected and self._store.check([name]) else b""
        while True:
            found = self._store.compare_set(name, old, new)
            if (value := self._open(name, found)) is not None:
                return value
            old = found

    def _open(self, name: str, sealed: bytes) -> bytes | None:
        value = unseal(self._key, name, sealed)
        if value is None:
            self.foreign = self.foreign or name
        return value

    def add(self, name: str, amount: int) -> int:
        """Count."""
        return self._store.add(name, amount)

    def check(self, names: list[str]) -> bool:
        """Whether all these names have values, foreign ones included."""
        return self._store.check(names)
