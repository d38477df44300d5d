"""How one machine is connected: names, the port of machine 0, network interfaces. Imports no torch."""

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from tools.doctor.findings import Asked, Finding

# Which interfaces a library takes, and in whose way of writing.
NAMED_BY = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check(asked: Asked, host: str) -> Iterator[Finding]:
    """All that one machine can be asked about its network."""
    yield from own_name(asked, host)
    if asked.machines > 1:
        yield from master(asked, host)
    if asked.machines > 1 and asked.machine == 0:
        yield from port(asked, host)
    yield from interfaces(asked, host)


def addresses(name: str) -> list[str]:
    """What a name resolves to; [] if it does not."""
    try:
        return list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(name, None)))
    except OSError:
        return []


def is_loopback(address: str) -> bool:
    """Whether an address in digits is this machine's own alone."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_own(address: str) -> bool:
    """Whether an interface of this machine has an address."""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe,
    ):
        probe.bind((address, 0))
        return True
    return False


def own_name(asked: Asked, host: str) -> Iterator[Finding]:
    """The machine's own name, which torch takes for its address where nobody tells it another."""
    found = addresses(socket.gethostname())
    do = f"give {socket.gethostname()} its address in DNS or /etc/hosts"
    if not found:
        yield Finding(
            *("name", host, None, "advice", f"the host name {socket.gethostname()} does not resolve"),
            "plain torchrun cannot tell others its address; the launchers here do without the name",
            do,
        )
    elif asked.machines > 1 and all(map(is_loopback, found)) and not any(map(is_loopback, addresses(asked.master))):
        yield Finding(
            *("name", host, None, "advice", f"the host name {socket.gethostname()} is {found[0]}, a loopback address"),
            "plain torchrun tells other machines to connect to themselves; the launchers here do without the name",
            do,
        )


def master(asked: Asked, host: str) -> Iterator[Finding]:
    """Machine 0's name, as this machine resolves it."""
    found = addresses(asked.master)
    do = "set MASTER_ADDR to an address of machine 0 that all machines reach"
    if not found:
        yield Finding(
            *("master", host, None, "breaks", f"MASTER_ADDR={asked.master} does not resolve"),
            "this machine waits in the rendezvous in vain",
            do,
        )
    elif asked.machine and any(map(is_own, found)):
        what = "a loopback address" if is_loopback(found[0]) else "an address of this machine"
        yield Finding(
            *("master", host, None, "breaks", f"MASTER_ADDR={asked.master} is {found[0]}, {what}, not of machine 0"),
            "this machine waits for itself",
            do,
        )
    elif not asked.machine and not any(map(is_own, found)):
        yield Finding(
            *("master", host, None, "breaks", f"MASTER_ADDR={asked.master} is {found[0]}, which this machine lacks"),
            "machine 0 cannot listen there",
            f"{do}; NODE_RANK=0 belongs to that machine",
        )


def port(asked: Asked, host: str) -> Iterator[Finding]:
    """Whether the port of the rendezvous is free on machine 0."""
    if not 0 < asked.port < 65536:
        yield Finding(
            *("port", host, None, "breaks", f"MASTER_PORT={asked.port}"),
            "there is no such port",
            "set one from 1024 to 65535",
        )
        return
    for address in addresses(asked.master):
        if not is_own(address):
            continue
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            socket.create_server((address, asked.port), family=family).close()
        except OSError as error:
            why = os.strerror(error.errno or 0) + held_by(asked.port)
            yield Finding(
                *("port", host, None, "breaks"),
                f"MASTER_PORT={asked.port} at {address} cannot be used ({why})",
                "the machines meet the other program, or nobody",
                "set another MASTER_PORT on all machines, or end that program",
            )
            return


def held_by(number: int) -> str:
    """The process that listens at a port, in words; "" if this user may not know."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == number:  # 0A: it listens
                    sockets.add(f"socket:[{words[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(file) in sockets for file in (process / "fd").iterdir()):
                return f", process {process.name}, {(process / 'comm').read_text().strip()}"
    return ""


def up_with_address() -> dict[str, str]:
    """Name to address of each interface that is up (IPv4)."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # an interface without an address
                siocgifflags, siocgifaddr = 0x8913, 0x8915  # netdevice(7)
                flags = struct.unpack("h", fcntl.ioctl(probe, siocgifflags, request)[16:18])[0]
                address = socket.inet_ntoa(fcntl.ioctl(probe, siocgifaddr, request)[20:24])
                if flags & 1:  # IFF_UP
                    found[name] = address
    return found


def chosen(value: str, names: list[str]) -> list[str]:
    """The interfaces that a value of NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME means.

    Args:
        value: names that interfaces begin with, or after "=" their whole names, or after "^" those not to take.
        names: of the interfaces that there are.
    """
    words = [word for word in value.lstrip("^=").split(",") if word]
    exact = "=" in value[:2]
    match = [name for name in names if any(name == word or (not exact and name.startswith(word)) for word in words)]
    return [name for name in names if name not in match] if value.startswith("^") else match


def interfaces(asked: Asked, host: str) -> Iterator[Finding]:
    """Whether the interfaces that the environment names are there, and lead elsewhere."""
    there = up_with_address()
    for variable in NAMED_BY:
        value = os.environ.get(variable, "")
        taken = chosen(value, [*there]) if variable.startswith("NCCL") else [n for n in value.split(",") if n in there]
        if not value:
            continue
        if not taken:
            yield Finding(
                *("interface", host, None, "breaks", f"{variable}={value}, and no interface of that name is up"),
                "ranks cannot connect to each other",
                f"unset it, or name one of {', '.join(there)}",
            )
        elif asked.machines > 1 and all(is_loopback(there[name]) for name in taken):
            yield Finding(
                *("interface", host, None, "breaks", f"{variable}={value} leads to this machine only"),
                "ranks of other machines cannot be reached",
                f"unset it, or name one of {', '.join(n for n in there if not is_loopback(there[n]))}",
            )


def mtus() -> dict[str, int]:
    """The largest packet of the interface that gloo takes, by its name."""
    found = {}
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        with contextlib.suppress(OSError, ValueError):
            found[name] = int(Path("/sys/class/net", name, "mtu").read_text()) if name else 0
    return {name: mtu for name, mtu in found.items() if mtu}
