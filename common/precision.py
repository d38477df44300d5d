"""Types that a model computes in and that its parameters are stored in."""

from collections.abc import Iterable

import torch

from common import UserError

HALVES = (torch.bfloat16, torch.float16)  # which parameters are not stored in
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, *HALVES, torch.float64)}
FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Map `--dtype` to a torch.dtype; auto is bfloat16 if the hardware computes in it, else float32."""
    if name == "auto":
        if device.type == "cuda":
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            cpu = torch.cpu.get_capabilities()
            native = bool(cpu.get("avx512_bf16") or cpu.get("amx_bf16") or cpu.get("bf16"))
        return torch.bfloat16 if native else torch.float32
    if name not in DTYPES:
        raise UserError(f"--dtype {name} is unknown: use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def param_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of the stored parameters: float32 also when computing in bfloat16 or float16, which autocast does."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Context that computes in bfloat16 or float16 where that is safe, if `dtype` asks for it; nothing on meta."""
    wanted = dtype in HALVES and device.type != "meta"
    return torch.autocast(device.type if wanted else "cpu", dtype if wanted else torch.bfloat16, enabled=wanted)


class LossScale:
    """Keeps the small gradients of float16 from vanishing: multiplies the loss, and divides the gradients again.

    A gradient that is not finite halves the scale, and GROWTH_STEPS steps without one double it (Micikevicius et al.
    2018, section 3.2, https://arxiv.org/abs/1710.03740).

    Attributes:
        value: (), on the device, to multiply the loss by; the number 1 for other types, whose range is float32's.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, saved: list[float] | None = None) -> None:
        """Begin with the state that a checkpoint has saved, or with a large scale."""
        scale, steps = saved or (FIRST_SCALE, 0)
        self._used = dtype == torch.float16
        self.value: torch.Tensor | int = torch.tensor(scale, device=device) if self._used else 1
        self._steps = torch.tensor(float(steps), device=device)  # since the scale has changed

    def unscale(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Divide the gradients by the scale."""
        if self._used:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self.value)

    def update(self, bad: torch.Tensor) -> torch.Tensor:
        """After a step whose gradient was `bad`, (), or not; no rank waits for its device.

        Returns:
            Whether a lower scale may help, (): then the fault is expected, and no one else's.
        """
        if not isinstance(self.value, torch.Tensor):
            return torch.zeros_like(bad)
        lowered = bad & (self.value > 1)
        self._steps.copy_(torch.where(bad, 0, self._steps + 1))
        grown = self._steps == GROWTH_STEPS
        self._steps.copy_(torch.where(grown, 0, self._steps))
        self.value.mul_(torch.where(lowered, 0.5, torch.where(grown, 2.0, 1.0)))
        return lowered

    def state(self) -> list[float]:
        """What a checkpoint saves; empty for other types."""
        return [float(self.value), self._steps.item()] if self._used else []
