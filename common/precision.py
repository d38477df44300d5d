"""What is computed in, and what is stored in."""

import torch

from common import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Map `--dtype` to a torch.dtype; auto is bfloat16 where the hardware computes in it, else float32."""
    if name == "auto":
        if device.type == "cuda":
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            cpu = torch.cpu.get_capabilities()
            native = bool(cpu.get("avx512_bf16") or cpu.get("amx_bf16") or cpu.get("bf16"))
        return torch.bfloat16 if native else torch.float32
    if name not in DTYPES:
        raise UserError(f"--dtype {name} is not known: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def param_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of the stored parameters: bfloat16 is for computing, under autocast; what is stored stays float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Compute in bfloat16 where that is safe, if it is asked for; on the meta device nothing is computed."""
    wanted = dtype == torch.bfloat16 and device.type != "meta"
    return torch.autocast(device.type if wanted else "cpu", torch.bfloat16, enabled=wanted)
