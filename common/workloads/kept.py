"""What a look at a data set or a model leaves as it was: the generators, and what a forward pass keeps in the model."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from common.train.data import map_tensors

PARTS = {*vars(nn.Module())}
TORCHS = ("torch.", "builtins", "typing", "abc")  # modules of classes that keep nothing of forward


@contextlib.contextmanager
def generators() -> Iterator[None]:
    """Afterwards, the generators of the CPU are in the state of before: a training in this process draws from them."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextlib.contextmanager
def model(whole: nn.Module) -> Iterator[None]:
    """Afterwards, the model's buffers, and the tensors that its own modules keep as attributes, are those of before.

    What has not changed stays the same object.
    """
    parts = {id(one) for one in (*whole.parameters(), *whole.buffers())}
    own = [one for one in whole.modules() if not all(base.__module__.startswith(TORCHS) for base in type(one).__mro__)]
    before = [{name: _tree(value) for name, value in vars(module).items() if name not in PARTS} for module in own]
    held = {id(one): one for values in before for _, found in values.values() for one in found}
    tensors = [*whole.buffers(), *(one for key, one in held.items() if key not in parts)]
    copies = [(one, one._version, one.detach().clone()) for one in tensors]
    yield
    for module, values in zip(own, before, strict=True):
        for name in [name for name in vars(module) if name not in PARTS]:
            tree, had = values.get(name, (None, []))
            has = _tree(vars(module)[name])[1]
            if [*map(id, has)] == [*map(id, had)]:
                continue
            if name in values:
                setattr(module, name, tree)
            else:
                delattr(module, name)
    with torch.no_grad():
        for one, version, copy in copies:
            if one._version != version:
                one.copy_(copy)


def _tree(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """The same tensors in the same lists, dicts and tuples, which are new; and all of the tensors."""
    found: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    kinds = (torch.Tensor, dict, list, tuple)
    return map_tensors(take, value) if isinstance(value, kinds) else value, found
