"""Private parts of torch and datasets that only a workload calls: all of them are here, each with its reason.

Any release may rename them. tests/workloads/test_private_api.py calls each one for real, and CI runs it on the oldest
versions that pyproject.toml allows and on the newest that were tested. Checked on CPU, torch 2.11.0 and 2.15.0,
datasets 4.0.0 and 5.2.0. CUDA: not run.
"""

import functools
import traceback
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from datasets import Dataset


def fingerprint(rows: "Dataset") -> str:
    """A name for a data set's rows and all that was done to them, the same in each process.

    Needs `datasets.Dataset._fingerprint`, the key of datasets' own cache. The public way is to read and hash all rows.
    """
    return rows._fingerprint


def file_in(error: BaseException | None) -> str:
    """The data file that `datasets` was reading when it raised, or "" if it does not tell.

    Needs the local variable `file` of its readers in `packaged_modules`: the error itself names no file.
    """
    while error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if "packaged_modules" in frame.f_code.co_filename and "file" in frame.f_locals:
                return str(frame.f_locals["file"])
        error = error.__cause__
    return ""


def block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    apart: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to one block of keys, and what joins it with that to others: the logarithm of its softmax's divisor.

    Needs the operators behind `scaled_dot_product_attention`, as `torch.distributed.tensor.experimental` does: the
    public function keeps the logarithms to itself. Types, widths and GPUs that the operator does not take are computed
    plainly, with all scores in memory. CUDA: not run.

    Args:
        query: (B, heads, T, D).
        key: (B, kv heads, S, D); each of its heads serves equally many of the queries'.
        value: the same shape.
        causal: whether query t reads the keys up to t alone; S is T then.
        apart: which keys each query does not read, (B, 1, T, S), perhaps all of them; None for none.

    Returns:
        The result, (B, heads, T, D), and the logarithms, (B, heads, T), in float32 or wider. No gradient flows back.
        For a query that reads none of the keys: 0, and the least number.
    """
    query, key, value = map(_in_rows, (query, key, value))
    key, value = (for_each_query(x, query) for x in (key, value))
    if apart is not None:  # no operator of GPUs takes it
        return _plain_attention(query, key, value, causal, apart)
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
    if has_flash(query):
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)[:2]
    return _plain_attention(query, key, value, causal)


def block_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    out: torch.Tensor,
    logarithms: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    apart: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of one block's queries, keys and values. Needs what `block_attention` needs.

    Args:
        grad: of the joined result, (B, heads, T, D).
        query: as in `block_attention`.
        out: the result of all blocks joined, (B, heads, T, D).
        logarithms: of all blocks joined, (B, heads, T).
        key: as in `block_attention`.
        value: as there.
        causal: as there.
        apart: as there.
    """
    few = key.shape[1]
    grad, query, out, key, value = map(_in_rows, (grad, query, out, key, value))
    key, value = (for_each_query(x, query) for x in (key, value))
    if apart is None and query.device.type == "cpu":
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, logarithms, 0.0, causal
        )
    elif apart is None and has_flash(query):
        unused = [torch.empty(size, dtype=torch.uint64, device=query.device) for size in ((2,), ())]  # no dropout
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(grad, query, key, value, out, logarithms.contiguous()),
            *(None, None, query.shape[2], key.shape[2], 0.0, causal, *unused),
        )
    else:
        gradients = _plain_attention_backward(grad, query, out, logarithms, key, value, causal, apart)
    return gradients[0], *(x.unflatten(1, (few, -1)).sum(2) for x in gradients[1:])


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """With the elements of a head beside each other: the operators read them so, and do not look at the strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def for_each_query(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values, (B, kv heads, S, D), repeated for the heads of the queries, (B, heads, T, D)."""
    return x if x.shape[1] == query.shape[1] else x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def has_flash(query: torch.Tensor) -> bool:
    """Whether the operator of GPUs takes this type, this width of heads, and this GPU: of NVIDIA's from Ampere on."""
    if query.dtype not in (torch.float16, torch.bfloat16) or query.shape[3] % 8 or query.shape[3] > 256:
        return False
    # Not `get_device_capability`, which torch.compile does not know.
    return not query.is_cuda or bool(torch.version.hip) or torch.cuda.get_device_properties(query.device).major >= 8


def _plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, apart: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(query, key, causal, apart)
    logarithms = scores.logsumexp(dim=3).clamp(min=torch.finfo(scores.dtype).min)
    return (scores - logarithms[..., None]).exp().to(value.dtype) @ value, logarithms


def _plain_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    out: torch.Tensor,
    logarithms: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    apart: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights = (_scores(query, key, causal, apart) - logarithms[..., None]).exp()
    by_weights = grad @ value.mT - (grad * out).sum(3, keepdim=True)
    by_scores = (weights * by_weights * query.shape[3] ** -0.5).to(query.dtype)
    return by_scores @ key, by_scores.mT @ query, weights.to(grad.dtype).mT @ grad


def _scores(query: torch.Tensor, key: torch.Tensor, causal: bool, apart: torch.Tensor | None) -> torch.Tensor:
    """Logarithms of the weights before they are divided, (B, heads, T, S)."""
    scores = (query @ key.mT * query.shape[3] ** -0.5).to(torch.promote_types(query.dtype, torch.float32))
    if causal:
        after = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        apart = after if apart is None else apart | after
    return scores if apart is None else scores.masked_fill(apart, -torch.inf)


@functools.cache
def _compiled() -> tuple[Any, Any]:
    """The operator for masks that are functions, and what makes them: each is fast only when compiled."""
    from torch.nn.attention import flex_attention  # slow to import

    return torch.compile(flex_attention.flex_attention), torch.compile(flex_attention.create_block_mask)


def document_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: torch.Tensor
) -> torch.Tensor:
    """Causal attention within documents, on a GPU: without scores in memory, and without a wait of the host.

    Needs `flex_attention`, which torch calls a prototype. The public operator takes a mask of all T x T scores; that
    for sequences of several lengths wants to know on the host how many there are. CUDA: not run.

    Args:
        query: (B, heads, T, D).
        key: (B, kv heads, T, D).
        value: the same shape.
        documents: number of each token's document, (B, T).
    """
    attend, make_mask = _compiled()

    def reads(batch: Any, head: Any, row: Any, column: Any) -> Any:
        return (row >= column) & (documents[batch, row] == documents[batch, column])

    length = query.shape[2]
    mask = make_mask(reads, len(query), None, length, length, device=query.device)
    return attend(query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])
