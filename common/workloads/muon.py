"""Muon: matrices move by their orthogonalised momentum, which one rank computes for all that hold a part of a matrix.

torch.optim.Muon computes each matrix on every rank, and in bfloat16 whatever the run's type is.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from common import keymap, precision
from common.workloads import several

# Of an iteration that brings all singular values near 1, quickly and not exactly (Jordan et al. 2024,
# https://kellerjordan.github.io/posts/muon/).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
# The root of the mean square of an update: with that of AdamW, its rate and weight decay fit (Liu et al. 2025, section
# 2.2, https://arxiv.org/abs/2502.16982).
RMS = 0.2
Places = list[tuple[torch.Tensor, torch.Tensor]]  # the rows and the columns of a matrix that each rank of a group has


class Muon(Optimizer):
    """Muon with Nesterov's momentum, for matrices alone.

    A matrix that is split over ranks travels to one of them and back, once each, in the type that it is computed in:
    of n ranks with equal parts, each sends 2 (n - 1) / n of its part of every matrix. Groups of ranks that hold the
    same parts (HSDP) each compute their own. A matrix that each of n ranks has whole is computed by one, which sends
    it to the others.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        momentum: float = 0.95,
    ) -> None:
        """Begin without momentum.

        Args:
            groups: of matrices, whose gradients are the same on all ranks that hold the same part; each with "lr", the
                rate of updates whose elements are as large as those of AdamW, and with "weight_decay", the share of a
                matrix that a step takes from it, times the rate.
            dtype: what updates are sent and orthogonalised in; float64 for a proof.
            group: the ranks that each hold the same plain tensors, such as a DDP's; None to compute them on each rank.
            momentum: share of the mean of the gradients that a step keeps.
        """
        # "fused", as torch calls it: `found_inf` skips an update, and all of the state is in tensors.
        super().__init__(groups, {"momentum": momentum, "fused": True})
        self.found_inf: torch.Tensor | float = 0.0
        self._dtype = dtype
        self._group = group
        self._groups: dict[Any, Any] = {}
        self._places: dict[Any, Places] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices that have a gradient: the same ones on all ranks, which all take part."""
        moves = 1.0 - torch.as_tensor(self.found_inf)  # 0 if a gradient is not finite
        found = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        updates = {p: self._direction(p, group["momentum"], moves) for p, group in found}
        by_holders: dict[Any, list[Any]] = {}
        for p in sorted(updates, key=lambda p: -p.numel()):  # ranks that compute at the same time have as much to do
            by_holders.setdefault(self._holders(p), []).append(p)
        for (group, each_has_all), matrices in by_holders.items():
            if each_has_all:
                self._compute_whole(matrices, updates, group)
            else:
                for i in range(0, len(matrices), group.size()):
                    self._compute_split(matrices[i : i + group.size()], updates, group)
        for p, group in found:
            rate = group["lr"] * moves.to(p.device, p.dtype)
            mine = _local(p)
            mine.mul_(1 - rate * group["weight_decay"])
            mine.sub_(updates[p] * (rate * RMS * math.sqrt(max(p.shape))))

    def _direction(self, p: Any, momentum: float, moves: torch.Tensor) -> torch.Tensor:
        """This rank's part of the update before it is orthogonalised."""
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        moves = moves.to(p.device, p.dtype)
        grad = torch.where(moves > 0, _local(p.grad), 0)
        mean = _local(state["momentum_buffer"]).lerp_(grad, (1 - momentum) * moves)
        return grad.lerp(mean, momentum).to(self._dtype)

    def _holders(self, p: Any) -> tuple[Any, bool]:
        """The ranks that share a matrix, None for this one alone; and whether each of them has all of it."""
        if not hasattr(p, "placements"):
            return self._group, True
        mesh = p.device_mesh
        axes = [i for i, one in enumerate(p.placements) if not one.is_replicate() and mesh.size(i) > 1]
        if not axes:
            return None, True
        key = mesh, *axes
        if key not in self._groups:
            self._groups[key] = mesh.get_group(axes[0])
            if len(axes) > 1:  # all ranks are here: their matrices have the same order
                grid = mesh.mesh.movedim(axes, [*range(-len(axes), 0)]).reshape(-1, math.prod(map(mesh.size, axes)))
                self._groups[key], _ = dist.new_subgroups_by_enumeration(grid.tolist())
        return self._groups[key], False

    def _compute_whole(self, matrices: list[Any], updates: dict[Any, torch.Tensor], group: Any) -> None:
        """Orthogonalise what this rank has whole: in turn with the others of its group, if it is in one."""
        for i, p in enumerate(matrices):
            owner = i % group.size() if group else 0
            if not group or owner == group.rank():
                updates[p] = orthogonalise(updates[p])
            if group:
                dist.broadcast(updates[p], group=group, group_src=owner)

    def _compute_split(self, matrices: list[Any], updates: dict[Any, torch.Tensor], group: dist.ProcessGroup) -> None:
        """Orthogonalise up to as many matrices as ranks: the i-th travels to rank i of the group, and back."""
        mine = matrices[group.rank()] if group.rank() < len(matrices) else None
        parts = [updates[p] for p in matrices]
        given = [part.numel() for part in parts] + [0] * (group.size() - len(parts))
        # The same rank's parts of other matrices have other shapes; all ranks ask for all of them.
        places = [self._places_of(p, group) for p in matrices]
        taken = [len(rows) * len(columns) for rows, columns in places[group.rank()]] if mine is not None else []
        taken = taken or [0] * group.size()
        sent = torch.cat([part.flatten() for part in parts])
        received = sent.new_empty(sum(taken))
        dist.all_to_all_single(received, sent, taken, given, group=group)
        if mine is not None:
            whole = sent.new_empty(mine.shape)
            of_ranks = places[group.rank()]
            for piece, (rows, columns) in zip(received.split(taken), of_ranks, strict=True):
                whole[rows[:, None], columns] = piece.view(len(rows), len(columns))
            whole = orthogonalise(whole)
            received = torch.cat([whole[rows[:, None], columns].flatten() for rows, columns in of_ranks])
        dist.all_to_all_single(sent, received, given, taken, group=group)
        for p, part, back in zip(matrices, parts, sent.split(given[: len(parts)]), strict=True):
            updates[p] = back.view_as(part)

    def _places_of(self, p: Any, group: dist.ProcessGroup) -> Places:
        """Which rows and columns of a matrix each rank of a group has (the group)."""
        key = p.device_mesh, p.placements, p.shape
        if key not in self._places:
            from torch.distributed.tensor import distribute_tensor  # slow to import

            numbers = [torch.arange(size, device=p.device) for size in p.shape]
            rows, columns = (
                distribute_tensor(one.expand(p.shape), p.device_mesh, p.placements, src_data_rank=None).to_local()
                for one in (numbers[0][:, None], numbers[1])
            )
            own = (rows[:, :1].flatten().tolist(), columns[:1].flatten().tolist())
            every: list[Any] = [None] * group.size()
            dist.all_gather_object(every, own, group=group)
            self._places[key] = [
                (torch.tensor(rows, device=p.device).long(), torch.tensor(columns, device=p.device).long())
                for rows, columns in every
            ]
        return self._places[key]


def orthogonalise(matrix: torch.Tensor) -> torch.Tensor:
    """Near the closest matrix with orthonormal rows or columns, (m, n), in the matrix's own type."""
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / (x.norm() + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x if matrix.shape[0] <= matrix.shape[1] else x.T).contiguous()


def for_matrices(model: Any, adamw: Optimizer, dtype: str) -> several.Several:
    """Muon for the matrices of the blocks, which it takes from an AdamW, and the AdamW for the rest.

    Args:
        model: under its strategy. Its `process_group`, as DistributedDataParallel has it, are the ranks that hold the
            same plain tensors.
        adamw: of all parameters, without a step.
        dtype: the run's type, as after --dtype.
    """
    blocks = {
        p: None for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in keymap.canonical(name).split(".")
    }
    groups = []
    for group in adamw.param_groups:
        groups.append({key: group[key] for key in ("lr", "weight_decay")})
        groups[-1]["params"] = [p for p in group["params"] if p in blocks]
        group["params"] = [p for p in group["params"] if p not in blocks]
    compute = precision.compute_dtype(dtype, next(model.parameters()).device)
    return several.Several(Muon(groups, compute, getattr(model, "process_group", None)), adamw)


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "placements") else tensor
