"""Types that a model computes in and that its parameters are stored in."""

import torch

from common import UserError

HALVES = (torch.bfloat16, torch.float16)  # which parameters are not stored in
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, *HALVES, torch.float64)}


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Map `--dtype` to a torch.dtype; auto is bfloat16 if the hardware computes in it, else float32."""
    if name == "auto":
        return torch.bfloat16 if has_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise UserError(f"--dtype {name} is unknown: use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def has_bfloat16(device: torch.device) -> bool:
    """Whether the hardware itself computes in it. What only emulates it is faster in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return any(torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def param_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of the stored parameters: float32 also when computing in bfloat16 or float16, which autocast does."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Context that computes in bfloat16 or float16 where that is safe, if `dtype` asks for it; nothing on meta."""
    wanted = dtype in HALVES and device.type != "meta"
    return torch.autocast(device.type if wanted else "cpu", dtype if wanted else torch.bfloat16, enabled=wanted)
