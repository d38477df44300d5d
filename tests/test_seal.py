"""What a stranger writes into a store that has no password, and what the run reads there."""

import json

import pytest
import torch.distributed as dist
from common import ranks, seal
from common.run import process_group

from tests.harness import runner

KEY, OTHER = seal.derive("secret", "start 1"), seal.derive("secret", "start 2")


@pytest.fixture
def raw() -> dist.Store:
    """As the stranger sees it."""
    return dist.HashStore()


@pytest.fixture
def store(raw: dist.Store) -> seal.SealedStore:
    return seal.SealedStore(raw, KEY)


@pytest.mark.parametrize("value", ["", "text", b"\x00\xff", "é" * 1000])
def test_round_trip(value: seal.Value) -> None:
    content = value.encode() if isinstance(value, str) else value
    assert seal.unseal(KEY, "name", seal.close(KEY, "name", value)) == content


def test_nothing_else_opens() -> None:
    """Another key, another name, a changed, shorter or longer value, no seal at all."""
    sealed = seal.close(KEY, "name", "value")
    assert seal.unseal(OTHER, "name", sealed) is None
    assert seal.unseal(KEY, "nam", sealed) is None
    assert seal.unseal(KEY, "names", sealed) is None
    for foreign in (b"", b"value", sealed[:-1], sealed + b"!", sealed[: seal.MAC_BYTES]):
        assert seal.unseal(KEY, "name", foreign) is None
    for i in range(len(sealed)):
        assert seal.unseal(KEY, "name", sealed[:i] + bytes([sealed[i] ^ 1]) + sealed[i + 1 :]) is None


def test_peek(raw: dist.Store, store: seal.SealedStore) -> None:
    assert store.peek("a") == ""
    store.set("a", "mine")
    assert store.peek("a") == "mine"
    assert store.foreign == ""
    raw.set("a", "theirs")
    assert store.peek("a") == ""
    assert store.foreign == "a"
    raw.set("a", seal.close(OTHER, "a", "from an earlier start"))
    assert store.peek("a") == ""
    store.set("b", "mine")
    raw.set("a", raw.get("b"))
    assert store.peek("a") == "", "moved from another name"


def test_compare_set(raw: dist.Store, store: seal.SealedStore) -> None:
    """As torch's; a foreign value, whatever is expected, is replaced, and never blocks."""
    assert store.compare_set("a", "", "1") == b"1"
    assert store.compare_set("a", "", "2") == b"1"
    assert store.compare_set("a", "1", "2") == b"2"
    for foreign in (b"", b"theirs", b"\xff\x00"):
        raw.set("a", foreign)
        assert store.compare_set("a", "2", "3") == b"3"
        raw.set("a", foreign)
        assert store.compare_set("a", "", "4") == b"4"
    raw.delete_key("a")
    assert store.compare_set("a", "4", "5") == b"5"


def meet() -> None:
    """Ranks read each other's values; a stranger with a connection of its own neither reads nor forges them."""
    world = process_group.start()
    assert isinstance(world.store._store, dist.TCPStore)
    world.store.set(f"from/{world.rank}", json.dumps(world.rank))
    assert world.store.check([f"from/{world.rank}"]), "the store answers: it has come, which `set` does not wait for"
    dist.barrier()
    assert json.loads(world.store.peek(f"from/{1 - world.rank}")) == 1 - world.rank
    stranger = world.store._store.clone()
    assert stranger.get("from/0") != b"0"
    dist.barrier()
    if world.rank == 0:
        stranger.set("from/1", b"1")
        stranger.set("from/0", seal.close(seal.derive("", ""), "from/0", "0"))
        assert stranger.get("from/0") != b"0"
    dist.barrier()
    assert world.store.clone().peek("from/0") == world.store.peek("from/1") == ""
    assert len({*ranks.gather(world.store._key.hex())}) == 1
    process_group.finish(world.process)


def test_ranks_share_a_key() -> None:
    result = runner.spawn(meet, [(), ()])
    assert result.ok, str(result)


def test_peek_all(raw: dist.Store, store: seal.SealedStore) -> None:
    store.set("a", "1")
    assert store.peek_all(["a", "b"]) == ["", ""], "one is missing"
    store.set("b", "2")
    assert store.peek_all(["a", "b"]) == ["1", "2"]
    raw.set("b", raw.get("a"))
    assert store.peek_all(["a", "b"]) == ["1", ""]
    assert store.foreign == "b"
