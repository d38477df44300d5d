"""A step of many micro-batches, from two steps of few: each further micro-batch adds the same."""

from collections.abc import Mapping
from typing import Any

SAME = ("kind", "axis", "ranks", "machines", "hidden")  # of a line of traffic


def few(stages: int) -> tuple[int, int]:
    """Two numbers of micro-batches between which, and beyond, a step grows evenly.

    One micro-batch is a case of its own: several add up their gradients. A pipeline of `stages` ranks must be full.
    """
    return (2, 3) if stages == 1 else (2 * stages, 4 * stages)


def more(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """What the counter would find for all micro-batches, from its findings for two numbers of them.

    Args:
        first: a rank's findings, of `counted` micro-batches, where all are `micro_batches`.
        second: of more of them.
    """
    low, high, all_ = first["counted"], second["counted"], first["micro_batches"]
    times = (all_ - low) / (high - low)

    def grown(a: float, b: float) -> float:
        found = a + (b - a) * times
        return round(found) if isinstance(a, int) and isinstance(b, int) else found

    def step(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
        counts = [{tuple(one[:-1]): one[-1] for one in some["products"]} for some in (a, b)]
        sent = [{tuple(one[key] for key in SAME): one for one in some["traffic"]} for some in (a, b)]
        none = {"calls": 0, "bytes": 0}
        return {
            "products": [
                [*key, grown(counts[0].get(key, 0), counts[1].get(key, 0))] for key in sorted({*counts[0], *counts[1]})
            ],
            "traffic": [
                dict(zip(SAME, key, strict=True))
                | {name: grown(*(some.get(key, none)[name] for some in sent)) for name in none}
                for key in sorted({*sent[0], *sent[1]})
            ],
            **{name: grown(a[name], b[name]) for name in ("elementwise_bytes", "exponentials", "kernels")},
        }

    # A pipeline's step is as long as its micro-batches, and what its ranks wait for.
    slots = grown(*(one["counted"] / (1 - one["idle"]) for one in (first, second)))
    return {
        **first,
        "counted": all_,
        "step": step(first["step"], second["step"]),
        "memory": {kind: grown(size, second["memory"][kind]) for kind, size in first["memory"].items()},
        "idle": 1 - all_ / slots,
    }
