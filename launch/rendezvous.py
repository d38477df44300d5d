"""Where several machines meet: at the address that leads to machine 0, for one job, with every failure explained.

torch would take each machine's name for its address, which others may not know, or which the machine itself takes for
its loopback address (as Debian sets it up).
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

USAGE_ERROR = 2
CUT_OFF_S = 5.0  # without an answer of machine 0
LINK_TIMEOUT = timedelta(hours=1)  # the kernel is earlier
met: list[str] = []  # the job whose rendezvous was found
questions: dict[int, float] = {}  # to machine 0, without an answer yet: thread, and since when


class Address(str):
    """A machine's address, in the order of NODE_RANK: torch sorts them, and the first machine has rank 0.

    Rank 0 talks to the terminal, which is to be machine 0's; and neighbours in a cluster have neighbouring ranks.
    """

    number: int

    def __lt__(self, other: str) -> bool:
        return (self.number, str(self)) < (getattr(other, "number", self.number), str(other))

    def __eq__(self, other: object) -> bool:
        return str(self) == other and self.number == getattr(other, "number", self.number)

    __hash__ = str.__hash__


def choose_interface(args: argparse.Namespace) -> None:
    """Let the ranks of this machine meet the others where machine 0 is met, unless the user has said where."""
    address = own_address(parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=-1)[0])
    args.local_addr = Address(args.local_addr or address or socket.getfqdn())
    args.local_addr.number = int(os.environ.get("NODE_RANK", "0"))  # launch/torchrun.sh has looked at it
    if address:
        with contextlib.suppress(KeyError):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interfaces()[args.local_addr])


def own_address(master: str) -> str:
    """This machine's address on the way to `master`; "" if that is here, or not known yet. Nothing is sent."""
    if master == "localhost" or is_loopback(master):
        return ""
    # On machine 0 its own name may mean a loopback address: then the way out is taken, and a documentation
    # address (RFC 5737) asks for that.
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
    """Whether these are the digits of an address that leads nowhere else."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return False


def interfaces() -> dict[str, str]:
    """IPv4 address to name of each network interface (Linux; elsewhere none)."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
            with contextlib.suppress(OSError):  # it has no address
                siocgifaddr = 0x8915  # netdevice(7)
                answer = fcntl.ioctl(probe, siocgifaddr, struct.pack("256s", name.encode()))
                found[socket.inet_ntoa(answer[20:24])] = name
    return found


def watch(args: argparse.Namespace, started: list[SubprocessContext]) -> None:
    """Refuse another job's rendezvous, and end this launcher where torch would wait in vain for an answer.

    Without a link to machine 0, some of torch's questions end the run after a minute, and some wait until the kernel
    gives the connection up, a quarter of an hour later; for a program at that port that says nothing, it waits forever.
    How long to wait for a link is for the ranks to say (--hang-timeout).

    Args:
        args: torchrun's.
        started: the ranks of this machine, at each start; filled later.
    """
    join, ask = C10dRendezvousBackend.__init__, C10dRendezvousBackend._call_store
    began = time.monotonic()
    found = re.search(r"\bread_timeout=(\d+)", args.rdzv_conf)
    read_timeout = timedelta(seconds=int(found[1] if found else 60))  # torch's own default
    patience_s = CUT_OFF_S + read_timeout.total_seconds()
    hosts = "is_host=0" not in args.rdzv_conf

    def join_own_job(backend: C10dRendezvousBackend, store: dist.Store, job: str) -> None:
        join(backend, store, job)
        if hosts:  # the store is here: whose it is, is not for the machine to say that is the first to ask
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
            failed = None not in codes and any(codes)  # until then, the link may come back and the ranks go on
            if (failed and unanswered) or (not met and now - began > patience_s):
                os._exit(explain(RendezvousConnectionError(), args))

    C10dRendezvousBackend.__init__ = join_own_job  # type: ignore[assignment, method-assign]
    C10dRendezvousBackend._call_store = ask_and_note  # type: ignore[assignment, method-assign]
    threading.Thread(target=look, name="rendezvous", daemon=True).start()


def explain(error: Exception, args: argparse.Namespace) -> int:
    """Say why the machines have not met, or no longer do; returns the exit code."""
    place = args.rdzv_endpoint
    again = "to go on, start the same command on every machine"
    if met and met[0] != args.rdzv_id:
        what = f"{place} is where job {met[0]} meets, and this is job {args.rdzv_id}: set another MASTER_PORT"
    elif isinstance(error, RendezvousTimeoutError):
        what = f"fewer than NNODES={args.nnodes} machines have come to {place} in time: start the same command on each"
    elif isinstance(error, RendezvousClosedError):
        what = f"job {args.rdzv_id} at {place} has ended on another machine; {again}"
    elif met:
        print(f"\nmachine 0, where the others meet at {place}, has ended or is cut off; {again}", file=sys.stderr)
        return 1
    elif "EADDRINUSE" in str(error.__cause__):
        what = f"another program on this machine has the port of {place}: set another MASTER_PORT, on all machines"
    else:
        what = (
            f"no rendezvous answers at {place}: does the command run on machine 0 (NODE_RANK=0), is MASTER_ADDR that "
            "machine's address, and does its firewall let MASTER_PORT through?"
        )
    print(f"error: {what}", file=sys.stderr)
    return USAGE_ERROR
