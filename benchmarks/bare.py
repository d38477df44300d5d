"""The same strategy without Brigade's loop: what duel.py and memory.py set a recipe beside.

A bare loop takes the recipe's data, model, strategy and optimizer (sections 2 and 3 of its train.py), and does forward,
backward and update, and nothing else: no seeds, guard, log, watch, signals, evaluation or checkpoint.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import keymap
from common.state import state_check
from common.train import data
from tests.harness import runner
from torch import nn

# One has one process; the step of the others is more than forward, backward and update (syncbn_ppo: see
# docs/measured/ppo.md).
OTHERS = ("dp_resnet", "diloco_gpt", "syncbn_ppo", "cellfree_mimo")
RECIPES = tuple(recipe for recipe in runner.RECIPES if recipe not in OTHERS)
PLAIN = (
    "ddp_resnet",
    "multinode_resnet",
    "ddp_gpt",
    "fsdp_gpt",
)  # whose backward pass and clipping are torch's; else those of section 3
SIZE, BATCH, SEGMENT, LOG_EVERY = 2, 16, 10, 10  # ranks, samples of a step, steps of a segment, steps between logs
NEVER = 10**6
FLAGS = {"dtype": "float32", "global-batch-size": BATCH, "log-every": LOG_EVERY}
FLAGS |= {"eval-every": NEVER, "save-every": NEVER}


def loop(recipe: str, part: dict[str, Any], args: Any, mesh: Any) -> Callable[[], None]:
    """Trains a model of its own for SEGMENT steps at each call, and did so once to warm up.

    Args:
        recipe: its name.
        part: what its train.py defines, as runpy gives it.
        args: its flags.
        mesh: the ranks and their axes.
    """
    train, _ = part["make_data"](args)
    model = part["parallelize"](args, part["make_model"](args, train), mesh, torch.device("cpu"))
    optimizer = part["make_optimizer"](args, model)
    dp_rank, dp_size = part["dp_coordinates"](mesh)
    count = BATCH // dp_size
    # A set in memory, which a step takes some of.
    indices = np.arange(dp_rank, 64 * BATCH, dp_size) % len(train)
    inputs, targets = train.read(np.zeros_like(indices), indices)
    generator = torch.Generator().manual_seed(dp_rank)

    def step(number: int) -> None:
        taken = torch.randint(len(inputs), (count,), generator=generator)
        batch = data.Batch(inputs[taken], targets[taken], BATCH, True)
        if recipe in PLAIN:
            loss = part["forward"](args, model, batch)["loss"] / count
            loss.backward()
            if args.max_grad_norm:
                nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        else:
            loss = part["forward_backward"](args, model, iter([batch]), dp_size)["loss"]
            part["clip_gradients"](args, model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number % LOG_EVERY == 0:
            loss.item()

    def segment() -> None:
        for number in range(SEGMENT):
            step(number)

    segment()
    # A bare loop that did not average its gradients would be faster for it.
    state_check.StateCheck(model, compare=True).compare(keymap.model_tensors(model), SEGMENT)
    return segment
