"""What a run shows of a script's strategy, for `port`."""

import re
from typing import Any

from tools.judge import seen


def traits(run: Any) -> dict[str, str]:
    """What a run has shown of a script's strategy, each with its line."""
    made = [one["id"] for one in run.of("step")]
    done = seen.steps(run.ranks[0], max(made, key=made.count, default=0))
    found = {one["kind"]: one["at"] for one in reversed(run.of("wrap"))}
    lines = {
        "sharded optimizer": [one["at"] for one in run.of("optimizer") if one["kind"] == "ZeroRedundancyOptimizer"],
        "accumulation": [one["at"] for one in seen.forwards(run.ranks[0]) if one["ddp"] and not one["sync"]],
        "exchange within a forward": exchanges(run),
        "steps": [step["at"] for step, _ in done],
    }
    if not {"DDP", "fully_shard"} & found.keys():
        sends = [[one["at"] for one in since if one["e"] == "collective" and is_mean(one)] for _, since in done]
        sends = sends[1:] or sends  # weights may be sent before the first step
        often = sum(map(bool, sends)) > 0.6 * len(sends)
        lines["gradients by hand" if often else "weights now and then"] = [one[0] for one in sends if one]
    return found | {name: ats[0] for name, ats in lines.items() if ats}


def exchanges(run: Any) -> list[str]:
    """The lines that send between the ranks while a model computes its output."""
    inside, found = False, []
    for one in run.ranks[0]:
        inside = (inside and one["e"] != "forwarded") or (one["e"] == "forward" and one["train"] and one["grad"])
        if inside and one["e"] == "collective" and one["direct"] and re.match("all_(gather|to_all)", one["name"]):
            found.append(one["at"])
    return found


def is_mean(one: Any) -> bool:
    """Whether a collective brings gradients or weights of the ranks together."""
    return bool(one["direct"] and (one["grads"] or one["weights"]) and one["name"] not in ("broadcast", "barrier"))
