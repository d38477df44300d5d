"""What only several machines together can show: pure comparisons, and trials in which all ranks take part."""

import itertools
import json
import select
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from common import printable, ranks, seal
from tools.doctor import folder
from tools.doctor.findings import Asked, Finding

Facts = dict[str, Any]  # what a rank knows of itself, see train.py
Rates = dict[tuple[int, int], float]  # bytes per second from one rank to another
SKEW_S = 2.0  # torch's rendezvous takes a machine for dead that is 15 s off, and logs cannot be compared
PROBE_BYTES = 2**20
MOST_BYTES = 2**25
PROBE_S = 0.2
AGAIN = 2  # how often a slow pair is measured again before it is accused
MOST_ROUNDS = 15  # in which each rank is measured with another one; beyond 16 machines, not every pair is
POLL_S = 0.05
SLOW = 0.5  # of the median of all pairs


def collect(
    store: seal.SealedStore, name: str, value: Any, rank: int, size: int, limit_s: float
) -> dict[int, tuple[Any, float]]:
    """This value of each rank that gives one in time, and when it was here; on the other ranks {} (no collective).

    Args:
        store: the ranks' store.
        name: of the value.
        value: a JSON value.
        rank: this rank.
        size: number of ranks.
        limit_s: how long rank 0 waits for all of them together.
    """
    store.set(f"{name}/{rank}", json.dumps(value))
    found: dict[int, tuple[Any, float]] = {}
    end = time.monotonic() + limit_s
    while rank == 0 and len(found) < size and time.monotonic() < end:
        for other in set(range(size)) - found.keys():
            if text := store.peek(f"{name}/{other}"):
                found[other] = json.loads(text), time.time()
        time.sleep(POLL_S)
    return found


def wait_for(store: seal.SealedStore, name: str, limit_s: float) -> str:
    """What rank 0 writes under a name.

    Raises:
        DistStoreError: nothing, in this time.
    """
    end = time.monotonic() + limit_s
    while not (text := store.peek(name)):
        if time.monotonic() > end:
            raise dist.DistStoreError(f"nothing under {name} came in {limit_s:g} s")
        time.sleep(POLL_S)
    return text


# --- comparisons --------------------------------------------------------------------------------------------------


def compare(everyone: Sequence[Facts]) -> Iterator[Finding]:
    """What must be, or should be, the same on all ranks: the first rank of each machine that differs from rank 0."""
    first = everyone[0]
    machines = first_of_each_machine(everyone)
    for one in machines[1:]:
        names = {**first["versions"], **one["versions"]}
        differ = [name for name in names if first["versions"].get(name) != one["versions"].get(name)]
        if differ:
            shown = ", ".join(
                f"{name} {one['versions'].get(name, 'missing')} (rank 0: {first['versions'].get(name, 'missing')})"
                for name in differ
            )
            yield Finding(
                *("versions", one["host"], one["rank"], "breaks", shown),
                "the run is refused, or its ranks wait for each other in different collectives",
                "install the same environment on all machines, or share one",
            )
        if changed := sorted(name for name in first["code"] if first["code"][name] != one["code"].get(name)):
            yield Finding(
                *("code", one["host"], one["rank"], "breaks", f"{', '.join(changed[:3])} differ from rank 0's"),
                "the run is refused",
                "use the same commit on all machines",
            )
    for name, severity, what in (
        ("driver", "advice", "bugs of one driver hit some ranks only"),
        ("gpu", "advice", "the slowest GPU sets the pace, and last digits depend on it"),
        ("processes", "cripples", "batches are divided by ranks, and a rank of a full machine sets the pace"),
    ):
        for one in machines[1:]:
            if one[name] != first[name]:
                yield Finding(
                    *(name, one["host"], one["rank"], severity, f"{name} is {one[name]!r} (rank 0: {first[name]!r})"),
                    what,
                    "use machines of one kind, set up alike",
                )
    yield from _compare_mtus(machines)


def first_of_each_machine(everyone: Sequence[Facts]) -> list[Facts]:
    """The facts of the first rank of each machine."""
    return list({one["machine"]: one for one in reversed(everyone)}.values())[::-1]


def _compare_mtus(machines: Sequence[Facts]) -> Iterator[Finding]:
    sizes = {one["host"]: min(one["mtus"].values(), default=0) for one in machines}
    most = max(sizes.values())
    for one in machines:
        if 0 < sizes[one["host"]] < most:
            yield Finding(
                *("mtu", one["host"], one["rank"], "cripples"),
                f"{', '.join(one['mtus'])} sends packets of {sizes[one['host']]} bytes, other machines of {most}",
                "larger packets may be dropped without a word: small messages arrive, the first gradients hang",
                "set the same MTU on all machines and switches (ip link set ... mtu)",
            )


def compare_clocks(machines: Sequence[Facts], ahead: Mapping[int, tuple[float, float]]) -> Iterator[Finding]:
    """Clocks against rank 0's.

    Args:
        machines: facts of the first rank of each machine.
        ahead: rank to how far its clock is ahead, in seconds, at least and at most: a message takes its time.
    """
    for one in machines:
        least, most = ahead.get(one["rank"], (0.0, 0.0))
        if least > SKEW_S or most < -SKEW_S:
            way = f"{least:.1f} s ahead of" if least > 0 else f"{-most:.1f} s behind"
            yield Finding(
                *("clock", one["host"], one["rank"], "breaks", f"its clock is {way} rank 0's, or more"),
                "torch's rendezvous takes a machine for dead that is 15 s off, and logs are in no order",
                "let a time service set the clocks (chrony, ntpd), see timedatectl",
            )


# --- trials in which all ranks take part -------------------------------------------------------------------------


def shared_folder(asked: Asked, store: seal.SealedStore, facts: Facts, size: int) -> list[Finding]:
    """Whether all machines see the file that machine 0 writes, and respect its lock; the findings are rank 0's."""
    limit_s = folder.ANSWER_S
    if facts["rank"] == 0:
        with folder.start("hold", asked.out) as holder:
            line = _line(holder, limit_s)
            store.set("folder/held", line)
            views = {
                rank: view
                for rank, (view, _) in collect(store, "folder/seen", "", 0, size, 2 * limit_s).items()
                if line
            }
        return [*_not_shared(asked, views)]
    view = ""
    if facts["local_rank"] == 0 and (line := wait_for(store, "folder/held", 2 * limit_s)):
        held = json.loads(line)
        with folder.start("see", held["file"], held["content"]) as looking:
            seen = _line(looking, limit_s).strip() or "no answer"
        view = facts["host"] + "\n" + ("seen" if seen == "unlocked" and not held["locked"] else seen)
    collect(store, "folder/seen", view, facts["rank"], size, limit_s)
    return []


def _line(process: Any, limit_s: float) -> str:
    """The first line that a process prints; "" if none comes in time."""
    ready, _, _ = select.select([process.stdout], [], [], limit_s)
    return process.stdout.readline() if ready else ""


def _not_shared(asked: Asked, views: Mapping[int, str]) -> Iterator[Finding]:
    for rank, view in sorted(views.items()):
        host, _, seen = printable(view).partition("\n")
        if seen in ("missing", "no answer"):
            yield Finding(
                *("shared", host, rank, "breaks", f"--out {asked.out} does not show the file that rank 0 wrote there"),
                "the run is refused, as each machine would save a part of a checkpoint",
                folder.DO,
            )
        elif seen == "unlocked":
            yield Finding(
                *("locks", host, rank, "advice", f"--out {asked.out}: a lock of rank 0 binds nobody here"),
                "two jobs of the same --name would write to one run",
                "mount it with locks (Lustre: -o flock), or give each job a --name of its own",
            )


def all_reduce(device: torch.device, backend: str, host: str, among: Any = None) -> Iterator[Finding]:
    """Whether a sum over all ranks is right (all ranks).

    Args:
        device: where the numbers are.
        backend: what adds them, for the finding.
        host: this machine.
        among: the process group; None for that of the world.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    values = torch.arange(2**18, dtype=torch.float32, device=device) % 1024  # (2 ** 18,); every sum is exact
    found = values * (rank + 1)
    dist.all_reduce(found, group=among)
    wrong = int((found != values * (size * (size + 1) // 2)).sum())
    if wrong:
        yield Finding(
            *("all-reduce", host, rank, "breaks", f"{wrong} of {found.numel()} sums by {backend} are wrong"),
            "ranks train apart, without an error",
            "exclude this machine, or update its driver and NCCL",
        )


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Pairs of so many players such that each plays once in a round, and in the end with everyone (circle method)."""
    players: list[int | None] = [*range(count), *[None] * (count % 2)]
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        players[1:] = [players[-1], *players[1:-1]]


def bandwidths(members: Sequence[int], device: torch.device, among: Any = None) -> Rates:
    """Bytes per second of each pair of ranks, in each direction (all ranks); what is slow is measured twice.

    Args:
        members: ranks to measure; the others look on.
        device: where the bytes are.
        among: the process group; None for that of the world.
    """
    schedule = [
        [(members[a], members[b]) for a, b in pairs]
        for pairs in itertools.islice(rounds(len(members)), MOST_ROUNDS)
    ]  # fmt: skip
    found = _measure(schedule, device, among)
    for _ in range(AGAIN):
        # One after the other: what else used the link in that moment does not count.
        again = _measure([[pair] for pair in dict.fromkeys((min(p), max(p)) for p in slow(found))], device, among)
        found = {pair: max(rate, again.get(pair, 0.0)) for pair, rate in found.items()}
    return found


def _measure(schedule: Sequence[Sequence[tuple[int, int]]], device: torch.device, among: Any) -> Rates:
    me = dist.get_rank()
    mine = []
    for pairs in schedule:
        for low, high in pairs:
            for sender, receiver in ((low, high), (high, low)):
                if me == sender:
                    mine.append([sender, receiver, _send(receiver, device, among)])
                elif me == receiver:
                    _receive(sender, device, among)
    return {(sender, receiver): rate for part in ranks.gather(mine) for sender, receiver, rate in part}


def _send(to: int, device: torch.device, among: Any) -> float:
    """Send more and more to a rank that `_receive`s; returns bytes per second of the largest message."""
    size, rate = PROBE_BYTES, 0.0
    answer = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(3):  # the first makes the connection
        content = torch.zeros(size, dtype=torch.uint8, device=device)
        dist.send(torch.tensor([size], device=device), to, among)
        dist.recv(answer, to, among)
        assert int(answer) == size  # it has made room
        began = time.perf_counter()
        dist.send(content, to, among)
        dist.recv(answer, to, among)
        assert int(answer) == 0  # it has read what has come
        rate = size / (time.perf_counter() - began)
        size = int(min(max(PROBE_BYTES, rate * PROBE_S), MOST_BYTES))
    dist.send(torch.tensor([0], device=device), to, among)
    return rate


def _receive(sender: int, device: torch.device, among: Any) -> None:
    size = torch.ones(1, dtype=torch.int64, device=device)
    while True:
        dist.recv(size, sender, among)
        if not int(size):
            return
        content = torch.ones(int(size), dtype=torch.uint8, device=device)
        dist.send(size, sender, among)
        dist.recv(content, sender, among)
        dist.send(content[-1:].long(), sender, among)


def slow(rates: Rates) -> list[tuple[int, int]]:
    """The pairs under half of the median of all, slowest first."""
    if not rates:
        return []
    median = statistics.median(rates.values())
    return sorted((pair for pair, rate in rates.items() if rate < SLOW * median), key=lambda pair: rates[pair])


def slow_links(rates: Rates, hosts: Sequence[str], backend: str) -> Iterator[Finding]:
    """Name the slow pairs; where one machine is slow with most others, that machine.

    Args:
        rates: what was measured.
        hosts: each rank's machine.
        backend: what has sent.
    """
    if not (pairs := slow(rates)):
        return
    median = statistics.median(rates.values())
    do = "look at its cable, its switch port and its network card (ethtool, ibstat), or exclude the machine"
    causes = "every all-reduce waits for the slowest link"
    named: set[tuple[int, int]] = set()
    ends = dict.fromkeys((pair[index], index) for pair in pairs for index in (0, 1))  # the slowest first
    for rank, index in ends:
        its_own = [pair for pair in rates if pair[index] == rank]
        if len(its_own) > 1 and all(pair in pairs for pair in its_own) and len({*its_own} - named) > 1:
            named.update(its_own)
            way = ("to", "from")[index]
            rate = statistics.median(rates[pair] for pair in its_own)
            shown = f"{rate / 1e6:,.0f} MB/s {way} all others by {backend}, median of all pairs {median / 1e6:,.0f}"
            yield Finding("bandwidth", hosts[rank], rank, "cripples", shown, causes, do)
    for pair in pairs:
        if pair not in named:
            shown = f"{rates[pair] / 1e6:,.0f} MB/s to {hosts[pair[1]]}, rank {pair[1]}, by {backend}, median of all "
            shown += f"pairs {median / 1e6:,.0f}"
            yield Finding("bandwidth", hosts[pair[0]], pair[0], "cripples", shown, causes, do)
