"""The rendezvous of several machines at machine 0's address: one job per port, and an explanation of every failure.

torch uses each machine's host name as its address. Other machines may not know that name, and the machine itself may
resolve it to its loopback address, as Debian does by default.
"""

import argparse
import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import struct
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from common.exits import USAGE_ERROR

CUT_OFF_S = 5.0  # seconds without an answer from machine 0
LINK_TIMEOUT = timedelta(hours=1)  # longer than the kernel's own
met: list[str] = []  # the job whose rendezvous this machine has found
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


def choose_interface(args: argparse.Namespace) -> None:
    """Make this machine's ranks use the network interface that leads to machine 0, unless the user has chosen one."""
    address = own_address(parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=-1)[0])
    args.local_addr = Address(args.local_addr or address or socket.getfqdn())
    args.local_addr.number = int(os.environ.get("NODE_RANK", "0"))  # launch/torchrun.sh has checked it
    if address:
        with contextlib.suppress(KeyError):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interfaces()[args.local_addr])


def own_address(master: str) -> str:
    """This machine's address on the route to `master`; "" if `master` is local or unknown. Sends nothing."""
    if master == "localhost" or is_loopback(master):
        return ""
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


def watch(args: argparse.Namespace, started: list[SubprocessContext]) -> None:
    """Refuse another job's rendezvous, and end this launcher when torch would wait in vain for an answer.

    Without a link to machine 0, some of torch's calls fail after a minute, and some wait until the kernel closes the
    connection, 15 minutes later. If another program holds the port and never answers, torch waits forever. The ranks
    decide how long to wait for a broken link (--hang-timeout).

    Args:
        args: torchrun's arguments.
        started: this machine's ranks, one entry for each start; filled later.
    """
    join, ask = C10dRendezvousBackend.__init__, C10dRendezvousBackend._call_store
    began = time.monotonic()
    found = re.search(r"\bread_timeout=(\d+)", args.rdzv_conf)
    read_timeout = timedelta(seconds=int(found[1] if found else 60))  # torch's own default
    patience_s = CUT_OFF_S + read_timeout.total_seconds()
    hosts = "is_host=0" not in args.rdzv_conf

    def join_own_job(backend: C10dRendezvousBackend, store: dist.Store, job: str) -> None:
        join(backend, store, job)
        if hosts:  # this machine hosts the store, so its job id wins, whoever connects first
            store.compare_set("launch/job", "", job)
        met.append(store.get("launch/job").decode())
        if met[0] != job:
            raise RendezvousClosedError

    def ask_and_note(backend: C10dRendezvousBackend, *question: Any, **more: Any) -> Any:
        questions[threading.get_ident()] = time.monotonic()
        backend._store.set_timeout(LINK_TIMEOUT)
        try:
            return ask(backend, *question, **more)
        finally:
            backend._store.set_timeout(read_timeout)
            del questions[threading.get_ident()]

    def look() -> None:
        while True:
            time.sleep(CUT_OFF_S / 10)
            now = time.monotonic()
            codes = [one.proc.poll() for one in started[-1].subprocess_handlers.values()] if started else [None]
            unanswered = now - min([*questions.values()], default=now) > CUT_OFF_S
            failed = None not in codes and any(codes)  # until then, the link may recover and the ranks continue
            if (failed and unanswered) or (not met and now - began > patience_s):
                os._exit(explain(RendezvousConnectionError(), args))

    C10dRendezvousBackend.__init__ = join_own_job  # type: ignore[assignment, method-assign]
    C10dRendezvousBackend._call_store = ask_and_note  # type: ignore[assignment, method-assign]
    threading.Thread(target=look, name="rendezvous", daemon=True).start()


def explain(error: Exception, args: argparse.Namespace) -> int:
    """Print why the rendezvous failed or was lost; returns the exit code."""
    place = args.rdzv_endpoint
    again = "to resume, start the same command on every machine"
    if met and met[0] != args.rdzv_id:
        reason = f"{place} is in use by job {met[0]}, and this is job {args.rdzv_id}: set another MASTER_PORT"
    elif isinstance(error, RendezvousTimeoutError):
        reason = f"fewer than NNODES={args.nnodes} machines joined at {place} in time: start the same command on each"
    elif isinstance(error, RendezvousClosedError):
        reason = f"job {args.rdzv_id} at {place} has ended on another machine; {again}"
    elif met:
        print(f"\nmachine 0, which hosts the rendezvous {place}, has ended or is cut off; {again}", file=sys.stderr)
        return 1
    elif "EADDRINUSE" in str(error.__cause__):
        reason = f"another program on this machine uses the port of {place}: set another MASTER_PORT on all machines"
    else:
        reason = (
            f"no rendezvous answers at {place}: check that the command runs on machine 0 (NODE_RANK=0), that "
            "MASTER_ADDR is its address, and that its firewall opens MASTER_PORT"
        )
    print(f"error: {reason}", file=sys.stderr)
    return USAGE_ERROR
