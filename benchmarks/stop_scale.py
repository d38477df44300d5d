"""What an agreement to stop asks of its store: `uv run python -m benchmarks.stop_scale`.

It fills a part of docs/measured/performance.md. Up to 64 ranks are threads with a connection each to a real TCPStore.
Their requests are counted, and the store's answers in a second are measured; more ranks than that are computed from
both, and the table says so.
"""

import statistics
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from tests.harness import fake_ranks, pages
from tests.harness.runner import ROOT

SIZES, ROUNDS, COMPUTED = (4, 16, 64), 3, (1024, 16_384)
QUESTIONS = 2000
HEAD = """\
| ranks | most requests of a rank | of all ranks | seconds | processor s | naive: of all ranks | naive: processor s |
|---|---|---|---|---|---|---|"""


def request_s() -> float:
    """Seconds that the store and one client take for a question."""
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    store.set("a", b"1")
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(QUESTIONS):
            store.get("a")
        times.append((time.process_time() - began) / QUESTIONS)
    return min(times)


def row(ranks: str, most: str, requests: int, seconds: str, size: int, each_s: float) -> str:
    """A line of the table, beside the way that asks most: each rank reads each one's step."""
    naive = 2 * size**2 + 2 * size
    cells = [ranks, most, f"{requests:,}", seconds, f"{requests * each_s:.2f}", f"{naive:,}", f"{naive * each_s:,.2f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure, compute, write."""
    each_s = request_s()
    lines = []
    for size in SIZES:
        rounds = [fake_ranks.agree(size) for _ in range(ROUNDS)]
        counts = [sum(one.counted.requests.values()) for one in rounds[0][0]]
        assert {one._target for ranks, _ in rounds for one in ranks} == {rounds[0][0][0]._target}
        took = statistics.median(seconds for _, seconds in rounds)
        lines.append(row(f"{size}", f"{max(counts)}", sum(counts), f"{took:.2f}", size, each_s))
    per_rank = sum(counts) / SIZES[-1]
    lines += [row(f"{size:,}, computed", "", round(per_rank * size), "", size, each_s) for size in COMPUTED]
    text = (
        f"Computed: as many requests of a rank as {SIZES[-1]} ranks have made, waiting included ({per_rank:.1f}), each "
        f"{1e6 * each_s:.0f} microseconds of one processor, for store and client together: the least that it can take."
    )
    pages.write(
        ROOT / "docs" / "measured" / "performance.md",
        measured_stop=pages.measured("uv run python -m benchmarks.stop_scale", "threads of one process"),
        stop="\n".join([HEAD, *lines, "", text]),
    )
    print("\n".join([*lines, text]))


if __name__ == "__main__":
    main()
