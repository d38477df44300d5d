"""What is computed in follows the hardware, and what is stored never loses bits."""

import pytest
import torch

from common import UserError, precision

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_pick_dtype() -> None:
    for name in ("float32", "float64", "bfloat16"):
        assert precision.pick(name, CPU) == getattr(torch, name)
    with pytest.raises(UserError, match=r"--dtype float16 is not known: auto, float32, bfloat16, float64"):
        precision.pick("float16", CPU)


@pytest.mark.parametrize(
    ("capabilities", "wanted"),
    [
        ({}, torch.float32),
        ({"avx2": True, "avx512_bf16": False, "amx_bf16": False}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"bf16": True}, torch.bfloat16),
    ],
    ids=str,
)
def test_auto_dtype_on_a_cpu(
    capabilities: dict[str, bool], wanted: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert precision.pick("auto", CPU) == wanted


@pytest.mark.parametrize(("native", "wanted"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_dtype_on_a_gpu(native: bool, wanted: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # A V100 emulates bfloat16, slower than float32.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native or including_emulation)
    assert precision.pick("auto", GPU) == wanted


def test_storage() -> None:
    assert precision.storage(torch.bfloat16) == torch.float32
    assert precision.storage(torch.float32) == torch.float32
    assert precision.storage(torch.float64) == torch.float64
