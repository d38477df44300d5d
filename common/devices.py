"""How this process's devices compute, and what to do when they have no memory left."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from common import precision, ranks

OF_CPU = "DefaultCPUAllocator"  # in a RuntimeError of torch, when a CPU has no memory left


def configure(matmul_precision: str, deterministic: bool) -> None:
    """Choose how the devices of this process compute; call it before the first one does.

    Args:
        matmul_precision: of products of float32 matrices, see `torch.set_float32_matmul_precision`. Convolutions
            follow it, while torch's own default for them is TF32: what is called float32 is float32.
        deterministic: the same command on the same GPUs gives the same bits. An operation that cannot do so raises, and
            its error names `torch.use_deterministic_algorithms`.
    """
    torch.set_float32_matmul_precision(matmul_precision)
    torch.backends.cudnn.allow_tf32 = matmul_precision != "highest"
    if deterministic:  # https://docs.nvidia.com/cuda/cublas/#results-reproducibility; cuBLAS reads it when it begins
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    # Try cuDNN's algorithms for each shape, and keep the fastest: a training has few shapes. Which is the fastest
    # differs from run to run, and its last digits with it.
    torch.backends.cudnn.benchmark = not deterministic


def used_by(model: torch.nn.Module, device: torch.device) -> list[torch.device]:
    """This process's device, and the others that its model computes on: nn.DataParallel drives several GPUs."""
    others = (getattr(model, "device_ids", None) or [])[1:]
    return [device, *(torch.device(device.type, index) for index in others)]


def notes(device: torch.device, dtype: torch.dtype, compiled: bool) -> Iterator[str]:
    """Lines for the terminal: all settings on a GPU, and on a CPU those that are not the default."""
    gpu = device.type == "cuda"
    products = torch.get_float32_matmul_precision()
    settings = [f"float32 matmul precision {products}"] if gpu or products != "highest" else []
    settings += [f"cudnn.benchmark {'on' if torch.backends.cudnn.benchmark else 'off'}"] if gpu else []
    settings += ["deterministic algorithms only"] if torch.are_deterministic_algorithms_enabled() else []
    if settings:
        yield f"devices  {', '.join(settings)}"
    if dtype == torch.bfloat16 and not precision.has_bfloat16(device):
        yield "note: this hardware only emulates bfloat16: --dtype float32 is faster on it (docs/measured/knobs.md)"
    if gpu and not compiled:
        yield (
            "note: without --compile, a GPU starts a kernel for each small operation, and reads and writes memory for "
            "each; torch.compile joins them, after a slow first step (docs/gpu.md)"
        )


def explain_out_of_memory(error: BaseException | None, frees: list[str], owners: tuple[Callable[[], Any], ...]) -> None:
    """Add to an error of a device without memory, which may be the cause of another one, what holds it and frees it.

    Args:
        error: any error.
        frees: flags that free activations, most first, with what they are now.
        owners: return the model and its optimizer; empty before both are there.
    """
    while error and not (isinstance(error, torch.OutOfMemoryError | MemoryError) or OF_CPU in str(error)):
        error = error.__cause__
    if error is None:
        return
    holds = ""
    others = "more devices, in a recipe that gives each a part of the model (README.md, Which recipe?)"
    advice = [*frees, others]
    with contextlib.suppress(Exception):  # an odd tensor of a user's own must not hide the error
        if owners:
            held = _held(*(owner() for owner in owners))
            holds = f" It holds, in GiB: {', '.join(f'{kind} {size / 2**30:.2f}' for kind, size in held.items())}."
            *states, rest = held.values()
            if sum(states) > rest:  # the flags free activations alone
                advice = [others, *frees]
    error.add_note(
        f"rank {ranks.rank()} is out of memory.{holds} It takes less with, in this order: {'; '.join(advice)}"
    )


def _held(model: Any, optimizer: Any) -> dict[str, int]:
    """Bytes of this rank's memory by what holds them, the rest last.

    Counted by storage: views, tied weights and gradients in a bucket share one, and FSDP empties that of a parameter
    which it has gathered and freed.
    """
    in_groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parameters = [*model.parameters(), *in_groups]  # FSDP: what is gathered now, and this rank's own parts
    states = [value for state in optimizer.state.values() for value in state.values()]
    kinds = {
        "parameters": [*parameters, *model.buffers()],
        "gradients": [parameter.grad for parameter in parameters],
        "optimizer state": states,
    }
    seen: dict[int, int] = {}
    held = {}
    for kind, tensors in kinds.items():
        before = sum(seen.values())
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                local: Any = tensor.detach()
                local = local.to_local() if hasattr(local, "placements") else local
                seen[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
        held[kind] = sum(seen.values()) - before
    device = in_groups[0].device
    if device.type == "cuda":
        everything = torch.cuda.memory_allocated(device)
    else:
        everything = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return held | {"activations and the rest": everything - sum(seen.values())}
