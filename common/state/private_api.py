"""Private parts of torch and safetensors that a checkpoint's files need; see `common/private_api.py`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch


def file_of_rank(rank: int) -> str:
    """Name of the file that a rank writes in a checkpoint: as torch's `HuggingFaceStorageWriter` would call it."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def files_of_rank(folder: Path, rank: int) -> list[Path]:
    """The files of a rank in a checkpoint's folder."""
    return sorted(folder.glob(f"shard-{rank + 1:05d}-*.safetensors"))


def shard_header(parts: Mapping[str, tuple[torch.dtype, Any]]) -> bytes:
    """Header of a safetensors file that holds these parts of tensors, dcp's `ChunkStorageMetadata`, in this order.

    Needs the entries that `HuggingFaceStorageReader` looks for, DCP_SHARDING_INFO and saved_offsets, which only
    `HuggingFaceStorageWriter` writes, and that one puts a whole file together in memory first; and
    `safetensors.torch._TYPES`, the format's names of types. https://huggingface.co/docs/safetensors#format
    """
    kinds = {dtype: kind for kind, dtype in safetensors.torch._TYPES.items()}
    offsets = {name: {"saved_offsets": list(chunk.offsets)} for name, (_, chunk) in parts.items()}
    header: dict[str, Any] = {
        "__metadata__": {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    }
    end = 0
    for name, (dtype, chunk) in parts.items():
        begin = end
        end += chunk.sizes.numel() * dtype.itemsize
        header[name] = {"dtype": kinds[dtype], "shape": list(chunk.sizes), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text
