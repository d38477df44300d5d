"""The store in which launchers wait: for values of the run alone, which outlive a stranger."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from common import seal
from launch.store import WaitingStore

from tests.harness import runner

KEY = seal.derive("secret", "start 1")


@pytest.fixture
def raw() -> dist.Store:
    """As the stranger sees it."""
    return dist.HashStore()


@pytest.fixture
def store(raw: dist.Store) -> WaitingStore:
    return WaitingStore(raw, KEY)


def test_get_waits_for_a_value_of_the_run(raw: dist.Store, store: WaitingStore) -> None:
    store.set_timeout(timedelta(seconds=0.3))
    for foreign in ("", "theirs"):
        if foreign:
            raw.set("a", foreign)
        with pytest.raises(dist.DistStoreError):
            store.get("a")
    store.set_timeout(timedelta(seconds=runner.HANG_S))
    store.set("a", "mine")
    assert store.get("a") == b"mine"


def test_get_puts_a_known_value_back(raw: dist.Store, store: WaitingStore) -> None:
    store.set("a", "mine")
    assert store.get("a") == b"mine"
    raw.set("a", b"\xff theirs")
    assert store.get("a") == b"mine"
    raw.delete_key("a")
    assert store.get("a") == b"mine"
    assert seal.unseal(KEY, "a", raw.get("a")) == b"mine"


def test_torch_reads_through_it(raw: dist.Store, store: WaitingStore) -> None:
    """As the launchers do, with a prefix that is part of the sealed name."""
    inner = dist.PrefixStore("round 1", store)
    inner.set("address", "10.0.0.1")
    inner.multi_set(["a", "b"], ["1", "2"])
    assert inner.get("address") == b"10.0.0.1"
    assert inner.multi_get(["a", "b"]) == [b"1", b"2"]
    assert inner.add("arrived", 2) == 2
    assert inner.check(["address"])
    inner.wait(["address"], timedelta(seconds=runner.HANG_S))
    raw.set("round 2/address", raw.get("round 1/address"))
    later = dist.PrefixStore("round 2", store)
    later.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(dist.DistStoreError):
        later.get("address")


def test_clone_waits_too(store: WaitingStore) -> None:
    copy = store.clone()
    store.set("a", "mine")
    assert copy.get("a") == b"mine"
