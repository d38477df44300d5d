"""Read tensors of a checkpoint in a store: each rank asks for the bytes that it needs, and no more."""

import functools
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.futures import Future

from common import manifest

READERS = 8  # requests at once
PIECE_BYTES = 2**24  # of a request, which memory holds until it is in its tensor
MOST_HEADER_BYTES = 10**8  # as the format has it: https://huggingface.co/docs/safetensors#format
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64},
}


class RangeReader:
    """A `torch.distributed.checkpoint.StorageReader` of the files that a manifest names."""

    def __init__(self, path: Any) -> None:
        """Know of nothing yet; `path` is the checkpoint's `StorePath`."""
        self._path = path

    def reset(self, *_: Any) -> None:
        """Nothing: it reads one checkpoint."""

    def read_metadata(self, *_: Any) -> Any:
        """Names, shapes and types of all tensors, and where their parts lie."""
        from torch.distributed.checkpoint import metadata as dcp

        tensors: dict[str, Any] = {}
        places: dict[Any, tuple[Any, ...]] = {}
        names = sorted(manifest.read_json(self._path / manifest.NAME)["files"])
        with ThreadPoolExecutor(READERS, "header") as pool:
            headers = [*pool.map(lambda name: _header(self._path / name), names)]
        for name, (begin, header) in zip(names, headers, strict=True):
            about = json.loads(header.get("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
            for tensor, entry in header.items():
                if tensor == "__metadata__":
                    continue
                shape = torch.Size(entry["shape"])
                dtype = DTYPES[entry["dtype"]]
                offsets = torch.Size(about.get(tensor, {}).get("saved_offsets", [0] * len(shape)))
                end = torch.Size(map(sum, zip(offsets, shape, strict=True)))
                one = tensors.setdefault(tensor, dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype), end, []))
                one.size = torch.Size(map(max, zip(one.size, end, strict=True)))
                one.chunks.append(dcp.ChunkStorageMetadata(offsets, shape))
                first = begin + entry["data_offsets"][0]
                places[dcp.MetadataIndex(tensor, offsets)] = self._path / name, first, shape, dtype
        return dcp.Metadata(tensors, storage_data=places)

    def set_up_storage_reader(self, metadata: Any, *_: Any, **__: Any) -> None:
        """Note where the tensors lie."""
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: Any) -> Any:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        """The plans as they are."""
        return plans

    def read_data(self, plan: Any, planner: Any) -> "Future[None]":
        """Fill the tensors of a plan."""
        targets = [planner.resolve_tensor(item).detach() for item in plan.items]
        pieces = [
            (*piece, target) for item, target in zip(plan.items, targets, strict=True) for piece in self._pieces(item)
        ]
        with ThreadPoolExecutor(READERS, "read") as pool:  # memory holds READERS runs at most
            for _ in pool.map(_fill, _runs(pieces)):
                pass
        for item, target in zip(plan.items, targets, strict=True):
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _pieces(self, item: Any) -> Iterator[tuple[Any, ...]]:
        """Of a part of a tensor: rows of the target, and where their bytes begin and end in which object."""
        path, first, shape, dtype = self._places[item.storage_index]
        if 0 in item.lengths:
            return
        if not shape:
            yield path, first, first + dtype.itemsize, dtype, shape, (), None
            return
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        rows = max(1, PIECE_BYTES // row_bytes)
        inner = tuple(
            slice(offset, offset + length)
            for offset, length in zip(item.storage_offsets[1:], item.lengths[1:], strict=True)
        )
        for row in range(0, item.lengths[0], rows):
            count = min(rows, item.lengths[0] - row)
            begin = first + (item.storage_offsets[0] + row) * row_bytes
            part = (count, *shape[1:])
            yield path, begin, begin + count * row_bytes, dtype, part, (slice(None), *inner), slice(row, row + count)


def _runs(pieces: list[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    """Pieces whose bytes follow each other, up to PIECE_BYTES: a request takes its time however small it is."""
    run: list[tuple[Any, ...]] = []
    for piece in sorted(pieces, key=lambda piece: (str(piece[0]), piece[1])):
        path, begin, end = piece[:3]
        if run and ((path, begin) != (run[-1][0], run[-1][2]) or end - run[0][1] > PIECE_BYTES):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _fill(run: list[tuple[Any, ...]]) -> None:
    path, first = run[0][:2]
    content = path.read(first, run[-1][2])
    for _, begin, end, dtype, shape, part, rows, target in run:
        own = bytearray(content[begin - first : end - first])
        found = torch.frombuffer(own, dtype=torch.uint8).view(dtype).reshape(shape)[part]
        (target if rows is None else target[rows]).copy_(found)


@functools.lru_cache(10_000)  # an object of that name is never written again
def _header(path: Any) -> tuple[int, dict[str, Any]]:
    """Where the numbers of a safetensors object begin, and what it says of them.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such object.
    """
    size = manifest.size(path)
    start = path.read(0, min(size, 2**16))  # enough for most
    num_bytes = int.from_bytes(start[:8], "little")
    if size < 8 or num_bytes > min(size - 8, MOST_HEADER_BYTES):
        raise ValueError(f"{path} is no safetensors file")
    text = start[8 : 8 + num_bytes]
    if len(text) < num_bytes:
        text += path.read(8 + len(text), 8 + num_bytes)
    return 8 + num_bytes, json.loads(text)
