"""How this process's devices compute: the precision of float32, and whether the same command gives the same bits."""

import os
from collections.abc import Iterator

import torch


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
