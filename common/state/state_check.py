"""What a checkpoint must not keep: numbers that are not finite, and replicas that differ."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from common import BadStateError, UserError, keymap, ranks
from common.state import replicas
from common.train import sync_batchnorm

NOT_SAVED = "This state is not saved"
STATE = (keymap.OPTIMIZER, keymap.STRATEGY)


class StateCheck:
    """Finds what a checkpoint must not keep: numbers that are not finite, and replicas that differ.

    Parameters, their optimizer state, their averages, and the statistics of SyncBatchNorm over all ranks are the same
    on all ranks that hold the same part of them. The statistics of BatchNorm are each rank's own, and have to be
    finite. Other buffers and frozen parameters may hold infinities on purpose, as a mask does.

    Attributes:
        kinds: what is checked, for the manifest.
    """

    def __init__(self, model: nn.Module, *, compare: bool) -> None:
        """Note what is to be checked.

        Args:
            model: the model under its strategy.
            compare: compare the replicas. Without it, only numbers that are not finite are found.
        """
        named = {keymap.canonical(name): parameter for name, parameter in model.named_parameters()}
        self._shared = {*named}
        self._finite = {name for name, parameter in named.items() if parameter.requires_grad}
        statistics = sync_batchnorm.statistics(model)
        self._finite |= statistics.keys()
        self._shared |= {name for name, module in statistics.items() if sync_batchnorm.is_over_all_ranks(module)}
        self.kinds = ["finite", "replicas"] if compare else ["finite"]

    def summarize(self, tensors: Mapping[str, torch.Tensor]) -> list[Any]:
        """This rank's part: what `judge` needs of its tensors, by canonical name; JSON values."""
        dense = {name: tensor.detach() for name, tensor in tensors.items() if tensor.layout == torch.strided}
        finite = {name: one for name, one in dense.items() if _is_of(name, self._finite)}
        shared = {name: one for name, one in dense.items() if self.is_shared(name)}
        return [_not_finite(finite), replicas.hashes_of(shared)]

    def is_shared(self, name: str) -> bool:
        """Whether all ranks that hold the same part of a tensor hold the same bits; what is not compared may differ."""
        return "replicas" in self.kinds and _is_of(name, self._shared)

    def compare(self, tensors: Mapping[str, torch.Tensor], step: int) -> None:
        """Compare these tensors over all ranks, which gather names only where there is something to name (all ranks).

        Raises:
            BadStateError: as `judge`.
        """
        names, hashes = self.summarize(tensors)
        differing = replicas.suspects(hashes)
        found = torch.tensor([bool(names or differing)], dtype=torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        if found:
            self.judge(ranks.gather([names, differing]), step)

    def judge(self, summaries: list[list[Any]], step: int) -> None:
        """Compare the summaries of all ranks.

        Raises:
            BadStateError: names the first tensor that is not finite, or that differs, and the ranks that hold it.
        """
        for rank, (names, _) in enumerate(summaries):
            if names:
                where = f"not finite at step {step}: {names[0]} on rank {rank}"
                why = "An update may have overflowed (lower --lr), or a device or its memory may be faulty"
                raise BadStateError(f"{where}. {why}. {NOT_SAVED}", step)
        holders: dict[str, dict[int, int]] = {}
        for rank, (_, hashes) in enumerate(summaries):
            for key, value in hashes.items():
                holders.setdefault(key, {})[rank] = value
        for key, found in holders.items():
            values = list(found.values())
            if len(set(values)) == 1:
                continue
            majority = max(values, key=values.count)  # between two ranks, the lower one's
            different = ", ".join(str(rank) for rank, value in found.items() if value != majority)
            others = f"rank {min(found)}" if len(found) == 2 else f"{values.count(majority)} of its {len(found)} ranks"
            where = f"replicas differ at step {step}: {key} on rank {different} differs from {others}"
            why = "A device or its memory may be faulty: exclude it if this happens again"
            raise BadStateError(f"{where}. {why}. {NOT_SAVED}", step)


def check_own(tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that an adopter's own tensors can be loaded, and are the same on all ranks that have them (all ranks).

    Raises:
        UserError: a name has none of the prefixes of `keymap.NO_WEIGHTS`; or one rank's tensor would be saved for all.
    """
    for name in tensors:
        if not name.startswith(keymap.NO_WEIGHTS):
            raise UserError(f"run.save got {name!r}, which is no part of the model: call it {f'extra.{name}'!r}")
    hashes = replicas.hashes_of({name: one for name, one in tensors.items() if one.layout == torch.strided})
    everyone = ranks.gather(replicas.suspects(hashes))
    for key in sorted({key for found in everyone for key in found}):
        holders = {rank: found[key] for rank, found in enumerate(everyone) if key in found}
        if different := [rank for rank, value in holders.items() if value != holders[min(holders)]]:
            name = key.partition(" ")[0]
            raise UserError(
                f"run.save got {name!r} with other numbers on rank {different[0]} than on rank {min(holders)}, and a "
                f"checkpoint has one tensor of a name: gather it first, or let each rank call it by its own number, as "
                f"in f'{name}.{{world.rank}}'"
            )


def _is_of(name: str, names: Collection[str]) -> bool:
    """Whether a tensor of a checkpoint is one of these of the model, or an average of one, or a strategy's state."""
    return name.removeprefix(keymap.AVERAGE) in names or name.startswith(STATE)


def _not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that hold NaN or an infinity."""
    extremes = {}
    for name, tensor in tensors.items():
        local = replicas.local(tensor)
        local = torch.view_as_real(local) if local.is_complex() else local
        # float8 has no minimum; a rank may hold no element of a small parameter.
        if local.is_floating_point() and local.element_size() > 1 and local.numel():
            extremes[name] = torch.stack(torch.aminmax(local)).double()  # both are NaN if an element is
    return [name for name, ends in replicas.read(extremes).items() if not all(map(math.isfinite, ends))]
