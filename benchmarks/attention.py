"""Causal attention on a CPU, torch's operator and its definition: `uv run python -m benchmarks.attention`.

It fills docs/measured/attention.md, from which `gpt.WRITTEN_OUT` is taken. Both take turns, on one thread, and the
gradients of both are compared with those in float64. A table of another processor stays.
"""

import json
import time
from typing import Any

import torch
from common.workloads import gpt
from tests.harness import pages
from tests.harness.runner import ROOT
from tools.about import cpu_name
from torch.nn import functional as F

ROUNDS = 12
SHAPES = [(16, 4, 32, 48), (16, 4, 64, 48), (16, 4, 128, 48), (8, 4, 256, 48), (4, 4, 512, 48), (2, 4, 1024, 48)]
SHAPES += [(4, 8, 128, 64), (1, 8, 512, 64), (4, 8, 128, 128), (1, 8, 512, 128)]
JSON, PAGE = (ROOT / "docs" / "measured" / f"attention.{kind}" for kind in ("json", "md"))
HEAD = """\
| B, heads, T, D | operator, ms | of it backward | definition, ms | of it backward | definition / operator | errors |
|---|--:|--:|--:|--:|--:|--:|"""


def operator(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What torch takes for attention on a CPU."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


ARMS = {"operator": operator, "definition": gpt.causal_attention}


def measure(shape: tuple[int, int, int, int]) -> dict[str, Any]:
    """Least processor milliseconds of both passes, of the backward pass, and the relative error of the gradients."""
    batch, heads, length, width = shape
    torch.manual_seed(0)
    inputs = [torch.randn(batch, length, heads, width).bfloat16().transpose(1, 2) for _ in range(4)]
    exact = [one.double().requires_grad_() for one in inputs[:3]]
    wanted = torch.cat([one.flatten() for one in torch.autograd.grad(operator(*exact), exact, inputs[3].double())])
    found: dict[str, Any] = {arm: {"ms": [], "backward": []} for arm in ARMS}
    for number in range(ROUNDS):
        for arm in list(ARMS)[:: -1 if number % 2 else 1]:
            leaves = [one.detach().requires_grad_() for one in inputs[:3]]
            began = time.process_time()
            out = ARMS[arm](*leaves)
            turned = time.process_time()
            gradients = torch.autograd.grad(out, leaves, inputs[3])
            ended = time.process_time()
            found[arm]["ms"].append(1e3 * (ended - began))
            found[arm]["backward"].append(1e3 * (ended - turned))
            got = torch.cat([one.flatten().double() for one in gradients])
            found[arm]["error"] = ((got - wanted).norm() / wanted.norm()).item()
    return {arm: {key: min(one) if isinstance(one, list) else one for key, one in found[arm].items()} for arm in ARMS}


def row(shape: str, found: dict[str, Any]) -> str:
    """A line of the table."""
    one, other = found["operator"], found["definition"]
    cells = [shape, *(f"{arm[key]:.1f}" for arm in (one, other) for key in ("ms", "backward"))]
    cells += [f"{other['ms'] / one['ms']:.2f}", f"{one['error']:.1e}, {other['error']:.1e}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure on this processor, and write the page."""
    torch.set_num_threads(1)
    gpt.WRITTEN_OUT = max(length for _, _, length, _ in SHAPES)
    rows = {", ".join(map(str, shape)): measure(shape) for shape in SHAPES}
    amx = " with AMX" if torch.cpu.get_capabilities().get("amx_bf16") else " without AMX"
    how = f"bfloat16, one thread, least of {ROUNDS} rounds"
    known = json.loads(JSON.read_text()) if JSON.exists() else {}
    known[cpu_name() + amx] = {"measured": pages.measured("uv run python -m benchmarks.attention", how), "rows": rows}
    JSON.write_text(json.dumps(known, indent=1) + "\n")
    parts = [
        "\n".join([f"{name}:\n\n{one['measured']}\n", HEAD, *(row(*pair) for pair in one["rows"].items())])
        for name, one in known.items()
    ]
    pages.write(PAGE, processors="\n\n".join(parts))


if __name__ == "__main__":
    main()
