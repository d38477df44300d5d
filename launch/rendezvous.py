"""Where the launchers of a run meet: in this process on one machine, else in a sealed store at machine 0's address.

torch's own rendezvous listens on all network interfaces, and each launcher unpickles whatever lies there. Here nothing
listens on one machine. On several, the store listens at the address that leads to the others, and what is not sealed
with RUN_KEY counts as absent (`launch/store.py`). One job per port, and an explanation of every failure.

torch uses each machine's host name as its address. Other machines may not know that name, and the machine itself may
resolve it to its loopback address, as Debian does by default.
"""

import argparse
import contextlib
import errno
import fcntl
import ipaddress
import os
import re
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from common import seal
from common.run.exits import USAGE_ERROR
from launch.ports import free_port
from launch.store import POLL_S, WaitingStore

NAME = "brigade"  # of this rendezvous, for torchrun's --rdzv-backend
HERE = "here"  # its --rdzv-endpoint on one machine
PORT = 29400
JOB = "launch/job"
NO_STATE = b"none"
CUT_OFF_S = 5.0  # seconds without an answer from machine 0
LINK_TIMEOUT = timedelta(hours=1)  # longer than the kernel's own
met: list[str] = []  # the job whose rendezvous this machine has found
stores: list[WaitingStore] = []  # where it has
questions: dict[int, float] = {}  # unanswered questions to machine 0: thread to start time


class Address(str):
    """A machine's address that sorts by NODE_RANK: torch sorts addresses, and the first machine gets rank 0.

    So rank 0 prints to machine 0's terminal, and neighbouring machines have neighbouring ranks.
    """

    number: int

    def __lt__(self, other: str) -> bool:
        return (self.number, str(self)) < (getattr(other, "number", self.number), str(other))

    def __eq__(self, other: object) -> bool:
        return str(self) == other and self.number == getattr(other, "number", self.number)

    __hash__ = str.__hash__


def prepare(args: argparse.Namespace, started: list[SubprocessContext]) -> None:
    """Choose this machine's address, offer the rendezvous to torchrun, and watch the link to machine 0.

    Args:
        args: torchrun's arguments; `local_addr` is filled in.
        started: this machine's ranks, one entry for each start; filled later.
    """
    if args.rdzv_endpoint != HERE:
        master = parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=PORT)[0]
        args.local_addr = Address(args.local_addr or own_address(master) or socket.getfqdn())
        args.local_addr.number = int(os.environ.get("NODE_RANK", "0"))  # launch/torchrun.sh has checked it
        threading.Thread(target=watch, args=(args, started), name="rendezvous", daemon=True).start()
    else:  # one machine
        args.local_addr = args.local_addr or "127.0.0.1"
        if os.environ.get("RUN_KEY") == "":  # as `export RUN_KEY=$(openssl ...)` makes it without openssl
            print("note: RUN_KEY is empty: this launch makes a key of its own", file=sys.stderr)
        os.environ["RUN_KEY"] = os.environ.get("RUN_KEY") or secrets.token_hex(32)
    with contextlib.suppress(KeyError):  # else gloo takes that of the host name, and NCCL the first
        interface = interfaces()[args.local_addr]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # "=": no other whose name begins so
    rendezvous_handler_registry.register(NAME, make_handler)


def own_address(master: str) -> str:
    """This machine's address on the route to `master`; "" if it has none. Sends nothing."""
    if master == "localhost" or is_loopback(master):
        return "127.0.0.1" if master == "localhost" else master
    # Machine 0's own name may resolve to its loopback address. Then use the default route, found by the route to a
    # documentation address (RFC 5737).
    for target in (master, "192.0.2.1"):
        with contextlib.suppress(OSError):
            for family, kind, _, _, place in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
                with socket.socket(family, kind) as probe:
                    probe.connect(place)
                    address = probe.getsockname()[0]
                if not is_loopback(address):
                    return address
    return next((address for address in interfaces() if not is_loopback(address)), "")


def is_loopback(address: str) -> bool:
    """Whether this is a loopback address, in digits."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return False


def interfaces() -> dict[str, str]:
    """IPv4 address to name of each network interface (Linux; elsewhere none)."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
            with contextlib.suppress(OSError):  # an interface without an address
                siocgifaddr = 0x8915  # netdevice(7)
                answer = fcntl.ioctl(probe, siocgifaddr, struct.pack("256s", name.encode()))
                found[socket.inet_ntoa(answer[20:24])] = name
    return found


def make_handler(params: RendezvousParameters) -> RendezvousHandler:
    """A rendezvous of torch that keeps its state in this process (one machine), or in machine 0's sealed store.

    Raises:
        RendezvousConnectionError: machine 0 cannot listen, or does not answer.
        RendezvousClosedError: another job is there.
    """
    if params.endpoint == HERE:
        here = dist.HashStore()
        handler = create_handler(here, Backend(here, params.run_id), params)
        meet = handler.next_rendezvous

        def meet_at_free_port() -> RendezvousInfo:
            found = meet()
            place = RendezvousStoreInfo(str(params.local_addr), free_port())
            return RendezvousInfo(found.store, found.rank, found.world_size, place)

        handler.next_rendezvous = meet_at_free_port  # type: ignore[method-assign]
        return handler
    hosts = params.get_as_bool("is_host")
    read_timeout = timedelta(seconds=params.get_as_int("read_timeout", 60) or 60)
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=PORT)
    try:
        if hosts:
            address = str(params.local_addr)
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listening = socket.create_server((address, port), family=family).detach()
            found = dist.TCPStore(address, port, is_master=True, timeout=read_timeout, master_listen_fd=listening)
        else:
            found = dist.TCPStore(host, port, is_master=False, timeout=read_timeout)
    except (OSError, ValueError, RuntimeError) as error:
        raise RendezvousConnectionError(f"no store at {params.endpoint}") from error
    store = WaitingStore(found, seal.derive(os.environ["RUN_KEY"], NAME))
    stores.append(store)
    if hosts:  # this machine hosts the store, so its job id wins, whoever connects first
        store.compare_set(JOB, "", params.run_id)
    began = time.monotonic()
    while not (job := store.peek(JOB)):  # `watch` ends the wait
        if store.foreign and time.monotonic() - began > CUT_OFF_S:
            raise RendezvousClosedError
        time.sleep(POLL_S)
    met.append(job)
    if job != params.run_id:
        raise RendezvousClosedError
    return create_handler(store, Backend(store, params.run_id), params)


class Backend(RendezvousBackend):
    """Keeps torch's state of the rendezvous, a pickle, under one name of a store.

    torch has such a backend, which unpickles what a stranger has written. A sealed store hands out only what a machine
    of this job has written, and puts it back where a stranger has replaced it.
    """

    def __init__(self, store: Any, run_id: str) -> None:
        self._store = store
        self._timeout = store.timeout
        self._state = f"torch.rendezvous.{run_id}"
        self._ask(store.compare_set, self._state, b"", NO_STATE)

    @property
    def name(self) -> str:
        """The name of this rendezvous."""
        return NAME

    def get_state(self) -> tuple[bytes, Any] | None:
        """The state, and itself as the token by which `set_state` notices a newer one; None if there is none yet."""
        state = self._ask(self._store.get, self._state)
        return None if state == NO_STATE else (state, state)

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        """Replace the state that `token` stands for; returns the state there afterwards, and whether it is this one."""
        found = self._ask(self._store.compare_set, self._state, token or NO_STATE, state)
        return None if found == NO_STATE else (found, found, found == state)

    def _ask(self, question: Callable[..., bytes], *words: Any) -> bytes:
        questions[threading.get_ident()] = time.monotonic()
        self._store.set_timeout(LINK_TIMEOUT)
        try:
            return question(*words)
        except (ValueError, RuntimeError) as error:
            raise RendezvousConnectionError("the connection to the rendezvous has failed") from error
        finally:
            self._store.set_timeout(self._timeout)
            del questions[threading.get_ident()]


def watch(args: argparse.Namespace, started: list[SubprocessContext]) -> None:
    """End this launcher when torch would wait in vain for an answer (never returns).

    Without a link to machine 0, some of torch's calls fail after a minute, and some wait until the kernel closes the
    connection, 15 minutes later. If another program holds the port and never answers, torch waits forever. The ranks
    decide how long to wait for a broken link (--hang-timeout).

    Args:
        args: torchrun's arguments.
        started: this machine's ranks, one entry for each start; filled later.
    """
    began = time.monotonic()
    found = re.search(r"\bread_timeout=(\d+)", args.rdzv_conf)
    patience_s = CUT_OFF_S + int(found[1] if found else 60)  # torch's own default
    quiet = {"silence", "strangers"}  # what has not been printed yet
    while True:
        time.sleep(CUT_OFF_S / 10)
        now = time.monotonic()
        codes = [one.proc.poll() for one in started[-1].subprocess_handlers.values()] if started else [None]
        unanswered = now - min([*questions.values()], default=now) > CUT_OFF_S
        failed = None not in codes and any(codes)  # until then, the link may recover and the ranks continue
        if (failed and unanswered) or (not met and now - began > patience_s):
            os._exit(explain(RendezvousConnectionError(), args))
        if not met and now - began > CUT_OFF_S and "silence" in quiet and (unknown := unknown_name(args)):
            quiet.remove("silence")
            print(f"waiting: {unknown}", file=sys.stderr)
        if met and "strangers" in quiet and any(store.foreign for store in stores):
            quiet.remove("strangers")
            print(
                f"warning: a stranger writes to the rendezvous {args.rdzv_endpoint}: ignored",
                file=sys.stderr,
            )


def unknown_name(args: argparse.Namespace) -> str:
    """Why machine 0's name leads nowhere; "" if this machine can resolve it."""
    name = parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=PORT)[0]
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return f"MASTER_ADDR={name} does not resolve on this machine ({error.strerror}): use machine 0's address"
    return ""


def explain(error: Exception, args: argparse.Namespace) -> int:
    """Print why the rendezvous failed or was lost; returns the exit code."""
    place = args.rdzv_endpoint
    cause = error.__cause__
    again = "to resume, start the same command on every machine"
    if met and met[0] != args.rdzv_id:
        reason = f"{place} is in use by job {met[0]}, and this is job {args.rdzv_id}: set another MASTER_PORT"
    elif isinstance(error, RendezvousClosedError) and not met:
        reason = f"{place} has another RUN_KEY: set the same on all machines, or another MASTER_PORT for another job"
    elif isinstance(error, RendezvousTimeoutError):
        reason = f"fewer than NNODES={args.nnodes} machines joined at {place} in time: start the same command on each"
    elif isinstance(error, RendezvousClosedError):
        reason = f"job {args.rdzv_id} at {place} has ended on another machine; {again}"
    elif met:
        print(f"\nmachine 0, which hosts the rendezvous {place}, has ended or is cut off; {again}", file=sys.stderr)
        return 1
    elif isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE:
        reason = f"another program on this machine uses the port of {place}: set another MASTER_PORT on all machines"
    elif isinstance(cause, OSError):
        reason = f"this machine cannot listen at {args.local_addr}, port of {place}: {cause.strerror}"
    elif unknown := unknown_name(args):
        reason = unknown
    else:
        reason = (
            f"no rendezvous answers at {place}: check that the command runs on machine 0 (NODE_RANK=0), that "
            "MASTER_ADDR is its address, and that its firewall opens MASTER_PORT"
        )
    print(f"error: {reason}", file=sys.stderr)
    return USAGE_ERROR
