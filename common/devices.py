"""How this process's devices compute, and what to do when they have no memory left."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from common import ranks

frees: list[str] = []  # flags that would free memory, most first, with what they are now; `cli.parse` sets it


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


def notes(device: torch.device, compiled: bool) -> Iterator[str]:
    """Lines for the terminal: all settings on a GPU, and on a CPU those that are not the default."""
    gpu = device.type == "cuda"
    precision = torch.get_float32_matmul_precision()
    settings = [f"float32 matmul precision {precision}"] if gpu or precision != "highest" else []
    settings += [f"cudnn.benchmark {'on' if torch.backends.cudnn.benchmark else 'off'}"] if gpu else []
    settings += ["deterministic algorithms only"] if torch.are_deterministic_algorithms_enabled() else []
    if settings:
        yield f"devices  {', '.join(settings)}"
    if gpu and not compiled:
        yield (
            "note: without --compile, a GPU starts a kernel for each small operation, and reads and writes memory for "
            "each; torch.compile joins them, after a slow first step (docs/gpu.md)"
        )


def explain_out_of_memory(error: BaseException | None) -> None:
    """Add to an error of a device without memory, which may be the cause of another one, what would free some."""
    while error and not _out_of_memory(error):
        error = error.__cause__
    if error is None:
        return
    left = ""
    if not isinstance(error, torch.OutOfMemoryError):  # whose message says how much a GPU has, and how much is left
        known = dict(re.findall(r"^(\w+): +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE))
        free, total = (int(known[name]) / 2**20 for name in ("MemAvailable", "MemTotal"))
        left = f" ({free:.1f} of {total:.1f} GiB of this machine's memory are free)"
    others = "more devices, in a recipe that gives each a part of the model (README.md, Which recipe?)"
    error.add_note(f"rank {ranks.rank()} is out of memory{left}. It takes less with: {'; '.join([*frees, others])}")


def _out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
