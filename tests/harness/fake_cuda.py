"""What `tools.plan.counter` counts, with mistakes that the counts must show.

Run as `python -m tests.harness.fake_cuda '[{"folder": "recipes/ddp_gpt", "size": 8, "flags": [], "mutant": ""}]'`: it
changes torch for the whole process, so nobody imports it into the tests. It prints a line of JSON for each case.
"""

import json
import sys
from typing import Any

import torch
from tools.plan import counter, fake_device


def _before_step(recipe: Any, action: Any) -> None:
    plain = recipe["clip_gradients"]

    def clip(args: Any, model: Any) -> Any:
        action(model)
        return plain(args, model)

    recipe["clip_gradients"] = clip


def _item(recipe: Any, model: Any) -> None:
    _before_step(recipe, lambda model: next(model.parameters()).sum().item())


def _cast(recipe: Any, model: Any) -> None:
    _before_step(recipe, lambda model: next(model.parameters()).detach().to(torch.float16))


def _cpu_index(recipe: Any, model: Any) -> None:
    _before_step(recipe, lambda model: torch.zeros(4, 4, device="cuda")[torch.arange(2)])


def _to_host(recipe: Any, model: Any) -> None:
    _before_step(recipe, lambda model: torch.zeros(4, device="cuda").cpu())


def _lost_collective(recipe: Any, model: Any) -> None:
    """One block's gradients are not sent."""
    blocks = [module for name, module in model.named_modules() if name.endswith(("blocks.0", "layer1"))]
    for part in (model, *blocks):
        if hasattr(part, "set_requires_gradient_sync") and part is not model:
            model.set_requires_gradient_sync = lambda *_: None
            part.set_requires_gradient_sync(False)
        elif isinstance(part, fake_device.Replicas):
            part._missing[-1] = 10**9  # so it is never full


def _held(recipe: Any, model: Any) -> None:
    """Something that lasts is kept from each step."""
    kept: list[Any] = []
    _before_step(recipe, lambda model: kept.append(torch.zeros(2**20, device="cuda")))


MUTANTS = {
    "": lambda recipe, model: None,
    "item": _item,
    "cast": _cast,
    "cpu index": _cpu_index,
    "to host": _to_host,
    "lost collective": _lost_collective,
    "held": _held,
}


def measure(mutant: str, **case: Any) -> dict[str, Any]:
    """As `counter.measure`, with a mistake."""
    return counter.measure(**case, change=MUTANTS[mutant])


if __name__ == "__main__":
    for case in json.loads(sys.argv[1]):
        print(counter.in_child(case, measure), flush=True)
