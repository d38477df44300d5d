"""Whether each rank's device computes and remembers: a quick look, so that no start uses a broken one."""

import socket

import torch

from common import UserError, ranks

SIZE = 256  # of the matrices
MEMORY_BYTES = 2**23
PATTERN = 0x55555555  # of each 32 bits, each beside its opposite


def check(device: torch.device) -> None:
    """Let each rank try its device, and compare with what must come out (all ranks).

    Raises:
        UserError: on every rank; names the hosts and devices that are wrong.
    """
    mine = f"{device} of {socket.gethostname()} (rank {ranks.rank()}) {fault}" if (fault := find_fault(device)) else ""
    if wrong := [one for one in ranks.gather(mine) if one]:
        raise UserError(f"{'; '.join(wrong)}: exclude that machine, or that device by CUDA_VISIBLE_DEVICES")


def find_fault(device: torch.device) -> str:
    """What this device does wrongly; "" if nothing. Takes 15 ms on a CPU."""
    # No sum exceeds 256, so that every type is exact, in whatever order a device adds.
    rows = torch.arange(SIZE * SIZE).view(SIZE, SIZE) % 3 - 1  # (SIZE, SIZE), int64
    wanted = multiply(rows, torch.device("cpu"), torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        if not torch.equal(multiply(rows, device, dtype), wanted.to(dtype)):
            return f"multiplies matrices of {str(dtype).removeprefix('torch.')} wrongly"
    kept = torch.full((MEMORY_BYTES // 4,), PATTERN, dtype=torch.int32, device=device)
    if not bool((kept == PATTERN).all() & (kept.bitwise_not_() == ~PATTERN).all()):  # each bit as 1 and as 0
        return f"does not keep the {MEMORY_BYTES / 1e6:.0f} MB that are written to its memory"
    return ""


def multiply(rows: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A matrix times its transpose, computed there, back on the CPU, (n, n)."""
    there = rows.to(device, dtype)
    return (there @ there.t()).cpu()
