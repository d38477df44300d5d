"""An exponential moving average of the weights, which evaluations use in their place: --ema.

Polyak and Juditsky 1992 (https://doi.org/10.1137/0330046) average the weights of all steps; the exponential form
forgets those of the start. Each rank averages the parts that it holds, so a strategy sends nothing for it.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils

from common import keymap, private_api, ranks
from common.state import checkpoint, replicas
from common.train import sync_batchnorm


class Average:
    """The averages of the weights that are trained, and of BatchNorm's statistics; other buffers have none.

    Attributes:
        tensors: this rank's parts of them, by their names in a checkpoint.
    """

    def __init__(self, model: nn.Module, decay: float, path: Path | None = None) -> None:
        """Begin with the averages of a checkpoint, or with its weights, or with those that the first step leaves.

        Args:
            model: under its strategy, with its weights loaded (all ranks).
            decay: share of the old average in the new one, such as 0.999, for an average over about 1 / (1 - decay)
                steps; 0 for no average.
            path: the checkpoint that the run continues from; None for a new run.

        Raises:
            UserError: as `checkpoint.load`.
        """
        self._model = model
        self._strategy: Any = model.strategy if keymap.has_strategy(model) else None
        self._average = swa_utils.get_ema_multi_avg_fn(decay)
        self._kept: list[torch.Tensor] = []  # the weights, while the model has their averages
        weights = _weights(model) if decay else {}
        # Of weights of 16 bits in 32: a thousandth of a step would be rounded away.
        self.tensors = {k: one.clone().to(torch.promote_types(one.dtype, torch.float32)) for k, one in weights.items()}
        self._weights = [*map(replicas.local, weights.values())]
        self._own = [*map(replicas.local, self.tensors.values())]
        # As in torch's AveragedModel, the random weights before the first step do not count.
        self._begins = path is None
        if path is None:
            return
        saved = checkpoint.tensors_in(path)
        found = any(name.startswith(keymap.AVERAGE) for name in saved)
        if found and decay:
            checkpoint.load(path, {name: one for name, one in self.tensors.items() if name in saved})
        elif found:
            ranks.print0(f"note: {path} has an average of the weights, which only --ema continues")
        elif decay:
            ranks.print0(f"note: {path} has no average of the weights: that of --ema {decay:g} begins with its weights")

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights that a step has left into the averages."""
        if not self.tensors:
            return
        if self._strategy:
            self._strategy.end_step()
        if self._begins:
            private_api.copy_each(self._own, self._weights)
        else:
            wide = [one.to(average.dtype) for average, one in zip(self._own, self._weights, strict=True)]
            self._average(self._own, wide, None)
        self._begins = False

    def to_save(self) -> dict[str, torch.Tensor]:
        """This rank's part of a checkpoint, by canonical name (all ranks)."""
        assert not self._kept, "run.evaluates returned True, and run.log_validation was not called"
        if self._strategy and self.tensors:
            self._strategy.agree(self.tensors)
        return self.tensors

    @torch.no_grad()
    def swap(self, on: bool) -> None:
        """Put the averages into the model if `on`, else the weights again (all ranks)."""
        if on == bool(self._kept) or not self.tensors:
            return
        if on:
            self.to_save()
        self._model.state_dict()  # asked for it, FSDP splits again what an evaluation has left whole
        kept = self._kept or [one.clone() for one in self._weights]
        private_api.copy_each(self._weights, self._own if on else kept)
        self._kept = kept if on else []


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """What is averaged, by the names of the averages in a checkpoint; shares memory with the model."""
    named = model.named_parameters(remove_duplicate=False)  # a tied weight is saved under one of its names
    names = {keymap.canonical(name) for name, parameter in named if parameter.requires_grad}
    names |= sync_batchnorm.statistics(model).keys()
    every = keymap.model_tensors(model)
    counts = {name for name, one in every.items() if not (one.is_floating_point() or one.is_complex())}
    return {keymap.AVERAGE + name: one for name, one in every.items() if name in names - counts}
