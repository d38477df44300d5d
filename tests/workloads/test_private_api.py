"""Each private part of torch and datasets that workloads call is there and does what it is called for.

A failure here names the part that a new release has changed.
"""

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from common.workloads import gpt, private_api
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

# --- files ---


def test_fingerprint_is_of_the_rows(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "some.txt").write_text("one\ntwo\n")
    (tmp_path / "other.txt").write_text("one\n")
    rows = [
        datasets.load_dataset("text", data_files=str(tmp_path / name), split="train", cache_dir=str(tmp_path / cache))
        for name, cache in (("some.txt", "a"), ("some.txt", "b"), ("other.txt", "a"))
    ]
    found = [private_api.fingerprint(one) for one in (*rows, rows[0].select([1]))]
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_file_that_datasets_was_reading(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    files = [str(tmp_path / name) for name in ("good.txt", "latin.txt")]
    with pytest.raises(datasets.exceptions.DatasetGenerationError) as error:
        datasets.load_dataset("text", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert private_api.file_in(error.value) == files[1]
    assert private_api.file_in(ValueError()) == ""


# --- attention to one block ---


def attention(seed: int, causal: bool, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, list[Any]]:
    """Query, key and value of grouped heads; a gradient of the result; and the result and three gradients by autograd.

    The public function keeps the logarithms of the softmax's divisors; they are computed beside it.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 4, 6, 8), (2, 2, 6 if causal else 10, 8), (2, 2, 6 if causal else 10, 8), (2, 4, 6, 8)]
    query, key, value, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    inputs = [x.to(dtype).requires_grad_() for x in (query, key, value)]
    out = nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=True)
    gradients = torch.autograd.grad(out, inputs, grad.to(dtype))
    return [x.detach() for x in inputs], grad.to(dtype), [out.detach(), *gradients]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_block_attention(dtype: torch.dtype, tolerance: float, causal: bool) -> None:
    """The operator gives what the public function does, and the logarithms; so does the plain way."""
    (query, key, value), grad, wanted = attention(0, causal, dtype)
    wide = [x.double().repeat_interleave(2, 1) for x in (key, value)]
    scores = query.double() @ wide[0].mT / 8**0.5
    after = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1) & causal
    logarithms = scores.masked_fill(after, -torch.inf).logsumexp(3)
    out, found = private_api.block_attention(query, key, value, causal)
    gradients = private_api.block_attention_backward(grad, query, out, found, key, value, causal)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    plain = private_api._plain_attention(query, *(x.to(dtype) for x in wide), causal)
    by_hand = private_api._plain_attention_backward(grad, query, *plain, *(x.to(dtype) for x in wide), causal)
    summed = [by_hand[0], *(x.unflatten(1, (2, 2)).sum(2) for x in by_hand[1:])]
    for out_, logarithms_, gradients_ in ((out, found, gradients), (*plain, summed)):
        torch.testing.assert_close(logarithms_.double(), logarithms, rtol=tolerance, atol=tolerance)
        for one, other in zip((out_, *gradients_), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_block_attention_of_no_samples() -> None:
    """A rank may read none in the last micro-batch."""
    query, few = torch.empty(0, 4, 6, 8), torch.empty(0, 2, 6, 8)
    out, logarithms = private_api.block_attention(query, few, few, causal=True)
    gradients = private_api.block_attention_backward(out, query, out, logarithms, few, few, causal=True)
    assert [x.shape for x in gradients] == [query.shape, few.shape, few.shape]


def test_block_attention_of_heads_that_are_not_rows() -> None:
    """Rotated heads of width 2 have their elements apart; the operator alone reads what is beside them."""
    (query, key, value), grad, wanted = attention(0, True, torch.float64)
    apart = [x.mT.contiguous().mT for x in (query, key, value, grad)]
    assert all(x.stride(-1) > 1 for x in apart)
    out, found = private_api.block_attention(*apart[:3], True)
    gradients = private_api.block_attention_backward(
        apart[3], apart[0], out.mT.contiguous().mT, found, *apart[1:3], True
    )
    for one, other in zip((out, *gradients), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# --- what a GPU's operator takes: mocks, because no machine of the tests has such GPUs ---


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str | None], None]:
    """Tensors of the meta device pass for those of a GPU with this major version, or of AMD's with one of HIP."""

    def pretend(major: int, hip: str | None) -> None:
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(major=major))
        monkeypatch.setattr(torch.version, "hip", hip)

    return pretend


GPUS = [  # major version, HIP, type, width of a head; whether flash attention takes them
    (7, None, torch.float16, 64, False),  # V100, T4
    (7, None, torch.bfloat16, 64, False),
    (8, None, torch.float16, 64, True),
    (9, None, torch.bfloat16, 256, True),
    (9, None, torch.bfloat16, 264, False),
    (9, None, torch.bfloat16, 20, False),
    (9, None, torch.float32, 64, False),
    (9, "6.4", torch.bfloat16, 64, True),
    (7, "6.4", torch.bfloat16, 64, True),  # not NVIDIA's count
]


@pytest.mark.parametrize(("major", "hip", "dtype", "width", "flash"), GPUS)
def test_operator_is_called_only_where_it_runs(
    major: int, hip: str | None, dtype: torch.dtype, width: int, flash: bool, as_on_gpu: Any
) -> None:
    """Elsewhere blocks are computed plainly; grouped heads are repeated, or torch would keep all T x T scores."""
    as_on_gpu(major, hip)
    query, key = (
        torch.empty(2, 4, 8, width, dtype=dtype, device="meta"),
        torch.empty(2, 2, 8, width, dtype=dtype, device="meta"),
    )
    called = Called()
    with called:
        out, logarithms = private_api.block_attention(query, key, key, True)
        gradients = private_api.block_attention_backward(out, query, out, logarithms, key, key, True)
    assert any("flash_attention" in name for name in called.names) == flash, called.names
    assert [one.shape for one in (out, *gradients)] == [query.shape, query.shape, key.shape, key.shape]
    asked: list[tuple[int, bool]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            gpt.F,
            "scaled_dot_product_attention",
            lambda q, k, v, is_causal, enable_gqa: asked.append((k.shape[1], enable_gqa)),
        )
        gpt.causal_attention(query, key, key)
    assert asked == [(2, True) if flash else (4, False)]


class Called(TorchDispatchMode):
    """Names of the operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("most", "operator"), [(6, False), (5, True)])
def test_short_texts_in_bfloat16_are_attended_to_by_the_definition(
    most: int, operator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads what the operator reads, and no later token, also with grouped heads."""
    monkeypatch.setattr(gpt, "WRITTEN_OUT", most)
    inputs, grad, _ = attention(0, True, torch.bfloat16)
    exact = [x.double().requires_grad_() for x in inputs]
    wanted = nn.functional.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    leaves = [x.requires_grad_() for x in inputs]
    called = Called()
    with called:
        out = gpt.causal_attention(*leaves)
    assert any("flash_attention" in name for name in called.names) == operator, called.names
    for one, other in zip(
        (out, *torch.autograd.grad(out, leaves, grad)),
        (wanted, *torch.autograd.grad(wanted, exact, grad.double())),
        strict=True,
    ):
        torch.testing.assert_close(one.double(), other, rtol=0.05, atol=0.05)


def test_other_types_are_attended_to_by_the_operator() -> None:
    for dtype in (torch.float32, torch.float64):
        called = Called()
        with called:
            gpt.causal_attention(*attention(0, True, dtype)[0])
        assert any("flash_attention" in name for name in called.names), called.names


def test_repeated_heads_compute_the_same() -> None:
    (query, key, value), _, (wanted, *_) = attention(0, True, torch.float64)
    repeated = [private_api.for_each_query(one, query) for one in (key, value)]
    torch.testing.assert_close(gpt.causal_attention(query, *repeated), wanted, rtol=1e-12, atol=1e-12)
