"""The recipes' bare twins in a loop: what duel.py and memory.py set a recipe beside.

The loop takes the model, data and optimizer of the recipe (section 2 of its train.py), and the strategy and step of its
bare.py: no seeds, guard, watch, signals, evaluation or checkpoint.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import keymap
from common.state import state_check
from common.train import initial
from tests.harness import twins

# One has one process; the step of the others is more than forward, backward and update (see the pages on both).
OTHERS = ("dp_resnet", "diloco_gpt", "syncbn_ppo")
RECIPES = tuple(recipe for recipe in twins.TWINS if recipe not in OTHERS)
SIZE, SEGMENT, LOG_EVERY = 2, 10, 10  # ranks, steps of a segment, steps between logs
NEVER = 10**6
FLAGS = {"dtype": "float32", "global-batch-size": twins.BATCH, "log-every": LOG_EVERY}
FLAGS |= {"eval-every": NEVER, "save-every": NEVER}


def argv(path: str, recipe: str, out: object, steps: int, *more: str) -> list[str]:
    """The command of a recipe with its twin's strategy."""
    flags = {"out": out, "name": "one", "max-steps": steps, **FLAGS}
    return [path, *(f"--{name}={value}" for name, value in flags.items()), *twins.flags(recipe, SIZE), *more]


@dataclass(frozen=True)
class Loop:
    """A twin that trains a model of its own.

    Attributes:
        segment: SEGMENT steps.
        means: what a segment's steps spend on the mean of their losses, and a recipe on each log alone.
    """

    segment: Callable[[], None]
    means: Callable[[], None]


def loop(recipe: str, part: dict[str, Any], args: Any, mesh: Any) -> Loop:
    """Set a twin up, and warm it up by one segment.

    Args:
        recipe: its name.
        part: what its train.py defines, as runpy gives it.
        args: its flags.
        mesh: the ranks and their axes.
    """
    twin = twins.load(recipe)
    train, _ = part["make_data"](args)
    device = torch.device("cpu")
    plain = initial.materialize(part["make_model"](args, train), args.seed, device, torch.float32)
    model = twin.parallelize(plain, device)
    optimizer = part["make_optimizer"](args, model)
    dp_rank, dp_size = part["dp_coordinates"](mesh)
    # A set in memory, which a step takes some of.
    indices = np.arange(dp_rank, 64 * twins.BATCH, dp_size) % len(train)
    inputs, targets = train.read(np.zeros_like(indices), indices)
    generator = torch.Generator().manual_seed(dp_rank)

    def segment() -> None:
        for number in range(SEGMENT):
            taken = torch.randint(len(inputs), (twins.BATCH // dp_size,), generator=generator)
            loss, _ = twin.train_step(model, optimizer, inputs[taken], targets[taken])
            if number % LOG_EVERY == 0:
                loss.item()

    def means() -> None:
        for _ in range(SEGMENT):
            dist.all_reduce(torch.zeros(()))

    segment()
    # A twin that did not average its gradients would be faster for it.
    state_check.StateCheck(model, compare=True).compare(keymap.model_tensors(model), SEGMENT)
    return Loop(segment, means)
