"""Checks of the numbers: gradients are finite; what a checkpoint keeps is finite, and equal on all replicas."""

import functools
import math
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from common import UserError, devices, keymap, precision, private_api, ranks
from common.state import replicas
from common.train import sampler, sync_batchnorm

NOT_SAVED = "This state is not saved"
STATE = (keymap.OPTIMIZER, keymap.STRATEGY)


class BadStateError(UserError):
    """State or updates that must not be kept; raised on all ranks.

    Attributes:
        step: the step that computed it, or after which it was found.
    """

    everywhere = True

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class FiniteGuard:
    """Skips updates whose gradient is not finite, and stops a training with too many of them in a row.

    The gradient norm is the same on all ranks, so all skip the same update. A tensor can make a fused optimizer's step
    change nothing (`private_api.skip_update_if`), so no rank waits for its device to find out. Any other optimizer gets
    no gradients for such a step, and each step waits for the norm.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: sampler.Plan,
        most: int,
        scale: precision.LossScale | None = None,
    ) -> None:
        """Begin, and create a fused optimizer's state, because its first update may be one to skip (all ranks).

        Args:
            model: its buffers, such as BatchNorm's statistics, are restored after a bad forward pass.
            optimizer: the optimizer of its parameters.
            plan: the samples of each step, to name them in an error.
            most: updates in a row that may be skipped.
            scale: float16's loss scale. Updates that are skipped in order to lower it do not count.
        """
        self._scale = scale or precision.LossScale(torch.float32, torch.device("cpu"))
        devices.owners = weakref.ref(model), weakref.ref(optimizer)  # before its state, for which memory may be missing
        self._fused = bool(optimizer.defaults.get("fused"))
        if self._fused:
            keymap.create_state(optimizer)
            private_api.skip_update_if(optimizer, torch.zeros(()))  # also for a recipe that asks for no skips
        else:
            ranks.print0(f"note: {type(optimizer).__name__} is not fused: each step waits for the gradient norm")
        self._optimizer = optimizer
        self._plan = plan
        self._most = most
        self._model = model
        self._looked = False
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in model.buffers():
            by_type.setdefault(buffer.dtype, []).append(buffer)
        self._buffers = [_Kept(buffers) for buffers in by_type.values()]
        device = next(model.parameters()).device
        self._bad = torch.zeros((), dtype=torch.bool, device=device)
        self._since_report: dict[int, torch.Tensor] = {}  # by step: whether its update was skipped, and to what end
        self._in_a_row = 0

    @property
    def loss_scale(self) -> torch.Tensor | int:
        """What train_step multiplies the loss by."""
        return self._scale.value

    def unscale_gradients(self) -> None:
        """Divide the gradients by the loss scale, before anything looks at them."""
        self._scale.unscale(self._model.parameters())

    def skip_if_not_finite(self, grad_norm: torch.Tensor) -> None:
        """Make the next optimizer step do nothing if the global gradient norm, (), is not finite."""
        if not self._looked:
            self._looked = True
            self._name_unreached()
        self._bad = ~grad_norm.isfinite()
        if self._fused:
            private_api.skip_update_if(self._optimizer, self._bad)
        elif self._bad:
            self._optimizer.zero_grad(set_to_none=True)

    def _name_unreached(self) -> None:
        """Warn of parameters without a gradient after the first backward pass (all ranks)."""
        mine = [
            keymap.canonical(name)
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ]
        everyone = ranks.gather(mine) if dist.is_initialized() else [mine]
        if names := sorted({name for part in everyone for name in part}):
            listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            ranks.print0(
                f"warning: the loss of the first step does not reach {listed}: use them in forward, or freeze them "
                "with requires_grad_(False); if only some steps use them, DistributedDataParallel needs "
                "find_unused_parameters=True in parallelize"
            )

    def restore_if_skipped(self, step: int) -> None:
        """After `step`: restore the buffers to their values before it, if its update was skipped."""
        bad = self._bad
        for kept in self._buffers:
            kept.restore_if(bad)
        lowered = self._scale.update(bad)
        self._since_report[step] = torch.stack((bad & ~lowered, lowered))

    def report(self) -> int:
        """Print how many updates were skipped (all ranks). Call it where the loop waits for the device anyway.

        Returns:
            The first step since the last report whose update was skipped; 0 if there was none.

        Raises:
            BadStateError: more updates in a row were skipped than allowed; names their steps and samples.
        """
        if not self._since_report:
            return 0
        figures = torch.stack([*self._since_report.values()]).long()  # (steps, 2)
        if dist.is_initialized():  # a rank whose norm alone was wrong must not act alone
            dist.all_reduce(figures, dist.ReduceOp.MAX)
        found = dict(zip(self._since_report, figures.tolist(), strict=True))
        self._since_report.clear()
        if lowered := sum(lowered for _, lowered in found.values()):
            updates = f"{lowered} update{'s' * (lowered > 1)}"
            ranks.print0(f"note: skipped {updates} to lower float16's loss scale to {float(self.loss_scale):g}")
        for step, (bad, _) in found.items():
            self._in_a_row = self._in_a_row + 1 if bad else 0
            if self._in_a_row > self._most:
                raise self._too_many(step)
        skipped = [step for step, (bad, _) in found.items() if bad]
        if skipped:
            updates = f"{len(skipped)} update{'s' * (len(skipped) > 1)}"
            ranks.print0(f"warning: skipped {updates} because the gradient was not finite")
        return min(skipped, default=0)

    def _too_many(self, last: int) -> BadStateError:
        steps = range(last - self._most, last + 1)
        message = f"the gradient was not finite in steps {steps[0]} to {last}, more than --max-skips "
        message += f"{self._most} allows: lower --lr, set --max-grad-norm"
        if self._plan.num_samples:  # otherwise samples are generated, and have no indices
            ends = [(self._plan.position(step - 1), self._plan.position(step)) for step in steps]
            read = "; ".join(str(self._plan.samples(start, stop)[1].tolist()) for start, stop in ends)
            message += f", or check the samples of these steps: {read}"
        return BadStateError(message, last)


class _Kept:
    """Buffers of one type, and copies of them: of all, one behind the other.

    A GPU takes longer to begin with each buffer than to copy it, and a processor to be asked for each.
    """

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self._buffers = buffers
        self._kept = torch.cat([buffer.flatten() for buffer in buffers])
        self._now = torch.empty_like(self._kept)
        sizes = [buffer.numel() for buffer in buffers]
        self._parts_kept, self._parts_now = (
            [part.view(buffer.shape) for part, buffer in zip(flat.split(sizes), buffers, strict=True)]
            for flat in (self._kept, self._now)
        )

    def restore_if(self, bad: torch.Tensor) -> None:
        """If `bad`, (), copy what is kept into the buffers; else keep what they hold now."""
        private_api.copy_each(self._parts_now, self._buffers)
        torch.where(bad, self._kept, self._now, out=self._kept)
        private_api.copy_each(self._buffers, self._parts_kept)


class StateCheck:
    """Finds what a checkpoint must not keep: numbers that are not finite, and replicas that differ.

    Parameters, their optimizer state and the statistics of SyncBatchNorm over all ranks are the same on all ranks that
    hold the same part of them. The statistics of BatchNorm are each rank's own, and have to be finite. Other buffers
    and frozen parameters may hold infinities on purpose, as a mask does.

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
        for name, module in model.named_modules():
            if isinstance(module, (*sync_batchnorm.BATCH_NORMS, nn.SyncBatchNorm)):
                statistics = {keymap.canonical(f"{name}.{key}") for key, _ in module.named_buffers(recurse=False)}
                self._finite |= statistics
                if sync_batchnorm.is_over_all_ranks(module):
                    self._shared |= statistics
        self.kinds = ["finite", "replicas"] if compare else ["finite"]

    def summarize(self, tensors: Mapping[str, torch.Tensor]) -> list[Any]:
        """This rank's part: what `judge` needs of its tensors, by canonical name; JSON values."""
        dense = {name: tensor.detach() for name, tensor in tensors.items() if tensor.layout == torch.strided}
        finite, shared = (
            {name: one for name, one in dense.items() if name in names or name.startswith(STATE)}
            for names in (self._finite, self._shared)
        )
        return [_not_finite(finite), _hashes(shared) if "replicas" in self.kinds else {}]

    def is_shared(self, name: str) -> bool:
        """Whether all ranks that hold the same part of a tensor hold the same bits; what is not compared may differ."""
        return "replicas" in self.kinds and (name in self._shared or name.startswith(STATE))

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


def _not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that hold NaN or an infinity."""
    extremes = {}
    for name, tensor in tensors.items():
        local = _local(tensor)
        local = torch.view_as_real(local) if local.is_complex() else local
        # float8 has no minimum; a rank may hold no element of a small parameter.
        if local.is_floating_point() and local.element_size() > 1 and local.numel():
            extremes[name] = torch.stack(torch.aminmax(local)).double()  # both are NaN if an element is
    return [name for name, ends in _read(extremes).items() if not all(map(math.isfinite, ends))]


def _hashes(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A hash of each tensor, by its name and, if it is split, the part of it that this rank holds."""
    return _read({name + part(tensor): position_hash(_local(tensor)) for name, tensor in tensors.items()})


def part(tensor: torch.Tensor) -> str:
    """Which part of a tensor this rank holds: the same text on all ranks that hold the same; "" if it is not split."""
    if not isinstance(tensor, DTensor):
        return ""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate() or ()
    split = [i for i, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return f" {[(mesh.size(i), coordinate[i]) for i in split]}"


def position_hash(tensor: torch.Tensor) -> torch.Tensor:
    """A number, () int64, that depends on every bit of a tensor and on its place in memory.

    The sum, modulo 2^64, of each element's bits times a random odd number of its place: unlike an XOR, it also changes
    if elements change places or if the same bit flips in two of them. Two different tensors have the same hash with a
    probability of about 2^-32 at most.
    """
    if not tensor.is_contiguous():  # such as channels_last: the order in memory does as well
        tensor = tensor.permute(*sorted(range(tensor.ndim), key=tensor.stride, reverse=True)).contiguous()
    # Halves of 8-byte elements: their highest bit times an odd number would be the same in each place.
    whole = {1: torch.uint8, 2: torch.int16}.get(tensor.element_size(), torch.int32)
    bits = tensor.reshape(-1).view(whole)
    factors = _factors(tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for i, block in enumerate(bits.split(len(factors))):
        total += (block * factors[: len(block)]).sum() * (2 * i + 1)
    return total


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """Random odd numbers, int64: as many as fit a processor's cache, or keep a GPU busy."""
    generator = torch.Generator().manual_seed(0)
    count = 2**16 if device.type == "cpu" else 2**22
    return (torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator) | 1).to(device)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _read(values: dict[str, torch.Tensor]) -> dict[str, Any]:
    """These small tensors as Python's numbers, with one wait for the device; optimizers keep counters on the CPU."""
    if not values:
        return {}
    device = next(iter(values.values())).device
    together = torch.stack([value.to(device) for value in values.values()])
    return dict(zip(values, together.tolist(), strict=True))
