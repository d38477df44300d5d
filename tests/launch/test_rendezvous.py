"""Where the launchers of a run meet: what they read there, at which address they listen, and what they refuse."""

import argparse
import os
import pickle
import secrets
import socket
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from common import seal
from launch.ports import PORTS, free_port
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    dynamic_rendezvous,
)

from launch import ports, rendezvous
from tests.harness import stranger

KEY = secrets.token_hex(32)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_KEY", KEY)
    monkeypatch.setattr(rendezvous, "met", [])
    monkeypatch.setattr(rendezvous, "stores", [])
    monkeypatch.setattr(rendezvous.Address, "number", 0, raising=False)
    # For a log that nobody asked for it looks at every module, for each frame of pytest: seconds, with all tests here.
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", lambda *_: "")


def make(endpoint: str, address: str = "127.0.0.1", hosts: str = "1") -> RendezvousHandler:
    more = {"is_host": hosts, "last_call_timeout": "1", "read_timeout": "3"}
    place = rendezvous.Address(address)
    return rendezvous.make_handler(RendezvousParameters(rendezvous.NAME, endpoint, "job", 1, 1, place, **more))


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Where a launcher of machine 0 listens, with torch's own addresses for the ranks."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return free_port()


def test_one_machine_needs_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    before = stranger.listening([os.getpid()])
    handler = make(rendezvous.HERE)
    for _ in range(2):  # the second time after a restart
        found = handler.next_rendezvous()
        assert (found.rank, found.world_size) == (0, 1)
        assert found.bootstrap_store_info.master_addr == "127.0.0.1"
        assert found.bootstrap_store_info.master_port in PORTS, "the system gives it to nobody else meanwhile"
    assert stranger.listening([os.getpid()]) == before
    assert handler.shutdown()


def test_port_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PORTS.stop < 30_000, "Kubernetes has those"
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        free = free_port()
        monkeypatch.setattr(ports, "PORTS", [taken, free])
        monkeypatch.setattr(ports, "TRIES", 2)
        assert free_port() == free
        monkeypatch.setattr(ports, "PORTS", [taken])
        monkeypatch.setattr(ports, "TRIES", 1)
        with pytest.raises(OSError, match=f"1 ports from {taken} to {taken} are in use"):
            free_port()


def test_listens_at_its_address_alone(port: int) -> None:
    handler = make(f"localhost:{port}")
    assert [place for place in stranger.listening([os.getpid()]) if place[1] == port] == [("127.0.0.1", port)]
    found = handler.next_rendezvous()
    assert (found.rank, found.world_size) == (0, 1)
    assert handler.shutdown()


def poison(port: int, marker: Path) -> RendezvousHandler:
    """A rendezvous whose state a stranger has replaced by a pickle that runs code."""
    handler = make(f"localhost:{port}")
    handler.next_rendezvous()
    client = dist.TCPStore("127.0.0.1", port, is_master=False)
    name = "torch.rendezvous.job"
    assert client.check([name])
    client.set(name, stranger.poison(marker))
    time.sleep(1.1)  # for a second, torch does not look again
    return handler


def test_pickle_of_a_stranger_is_not_loaded(port: int, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    handler = poison(port, marker)
    assert handler.num_nodes_waiting() == 0
    assert not handler.is_closed(), "the state is the launcher's own again"
    assert handler.next_rendezvous().world_size == 1
    assert handler.shutdown()
    assert not marker.exists()
    assert rendezvous.stores[0].foreign == "torch.rendezvous.job"


def test_mutant_that_does_not_seal(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "close", lambda key, name, value: value.encode() if isinstance(value, str) else value)
    monkeypatch.setattr(seal, "unseal", lambda key, name, sealed: sealed)
    marker = tmp_path / "ran"
    handler = poison(port, marker)
    with pytest.raises(AttributeError):  # of the state that the pickle has made
        handler.num_nodes_waiting()
    assert marker.exists()


def test_machine_without_the_key(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make(f"localhost:{port}")
    monkeypatch.setenv("RUN_KEY", secrets.token_hex(32))
    monkeypatch.setattr(rendezvous, "met", [])
    monkeypatch.setattr(rendezvous, "CUT_OFF_S", 0.2)
    with pytest.raises(rendezvous.RendezvousClosedError) as refusal:
        make(f"localhost:{port}", hosts="0")
    assert explained(refusal.value, f"localhost:{port}") == (
        f"error: localhost:{port} has another RUN_KEY: set the same on all machines, "
        "or another MASTER_PORT for another job\n"
    )


def explained(error: Exception, endpoint: str, address: str = "127.0.0.1") -> str:
    """What the launcher prints."""
    args = argparse.Namespace(rdzv_endpoint=endpoint, rdzv_id="job", nnodes="2", local_addr=address)
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr(rendezvous.sys.stderr, "write", printed.append)
        assert rendezvous.explain(error, args) == 2
    return "".join(printed)


@pytest.mark.parametrize(
    ("endpoint", "address", "hosts", "reason"),
    [
        ("localhost:{}", "192.0.2.1", "1", "this machine cannot listen at 192.0.2.1, port of localhost:{}: Cannot "),
        ("nobody.invalid:{}", "127.0.0.1", "0", "MASTER_ADDR=nobody.invalid does not resolve on this machine ("),
        ("localhost:{}", "127.0.0.1", "0", "no rendezvous answers at localhost:{}: check that "),
    ],
    ids=["address of another machine", "unknown name", "nobody there"],
)
def test_refusals(endpoint: str, address: str, hosts: str, reason: str, port: int) -> None:
    endpoint = endpoint.format(port)
    with pytest.raises(RendezvousConnectionError) as refusal:
        make(endpoint, address, hosts)
    assert explained(refusal.value, endpoint, address).startswith(f"error: {reason.format(port)}")


def test_port_in_use(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)), pytest.raises(RendezvousConnectionError) as refusal:
        make(f"localhost:{port}")
    assert "another program on this machine uses the port" in explained(refusal.value, f"localhost:{port}")


def prepared(endpoint: str, monkeypatch: pytest.MonkeyPatch, **environ: str) -> argparse.Namespace:
    monkeypatch.setattr(rendezvous, "watch", lambda *_: None)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "RUN_KEY", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    args = argparse.Namespace(rdzv_endpoint=endpoint, rdzv_conf="", local_addr=None)
    rendezvous.prepare(args, [])
    return args


def test_one_machine_stays_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a key of its own for each start; what the user has set, stays."""
    args = prepared(rendezvous.HERE, monkeypatch)
    assert args.local_addr == "127.0.0.1"
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    first = os.environ["RUN_KEY"]
    assert len(first) == 64
    prepared(rendezvous.HERE, monkeypatch)
    assert os.environ["RUN_KEY"] != first
    prepared(rendezvous.HERE, monkeypatch, GLOO_SOCKET_IFNAME="eth7", NCCL_SOCKET_IFNAME="ib", RUN_KEY=KEY)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "RUN_KEY")
    assert [os.environ[name] for name in names] == ["eth7", "ib", KEY]


def test_empty_key_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As `export RUN_KEY=$(openssl rand -hex 32)` makes it where there is no openssl."""
    prepared(rendezvous.HERE, monkeypatch)
    assert not capsys.readouterr().err
    prepared(rendezvous.HERE, monkeypatch, RUN_KEY="")
    assert len(os.environ["RUN_KEY"]) == 64
    assert capsys.readouterr().err == "note: RUN_KEY is empty: this launch makes a key of its own\n"


def test_address_on_the_way_to_machine_0(monkeypatch: pytest.MonkeyPatch) -> None:
    args = prepared("127.0.0.1:5", monkeypatch, NODE_RANK="3", RUN_KEY=KEY)
    assert (args.local_addr, args.local_addr.number) == ("127.0.0.1", 3)
    assert rendezvous.own_address("localhost") == "127.0.0.1"
    assert rendezvous.own_address("::1") == "::1"


def test_state_is_torchs(port: int) -> None:
    """Machines sort by NODE_RANK in it: it goes through a pickle, of this job's own machines only."""
    address = rendezvous.Address("10.0.0.9")
    address.number = 2
    assert pickle.loads(pickle.dumps(address)).number == 2
