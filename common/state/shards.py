"""Write a rank's part of a checkpoint as one safetensors file, as `HuggingFaceStorageReader` reads it.

torch's own `HuggingFaceStorageWriter` first makes the whole file in memory, twice, and knows no digests. Here each
tensor goes from where it is to the file, and its bytes into the digests on their way.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.futures import Future

from common import manifest
from common.state import private_api

if TYPE_CHECKING:  # slow to import
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult


class ShardWriter:
    """A `torch.distributed.checkpoint.StorageWriter`: `dcp.save` writes a rank's tensors with it."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Name the rank's file in a folder that exists."""
        self._file = folder / private_api.file_of_rank(rank)
        self._digests: list[str] = []
        self._error: Exception | None = None

    def write_data(self, plan: "SavePlan", planner: "SavePlanner") -> "Future[list[WriteResult]]":
        """Write the file; `seal` raises what goes wrong."""
        try:
            if plan.items:
                with self._file.open("xb", buffering=manifest.BLOCK_BYTES) as file:
                    self._digests = manifest.write_blocks(file, _contents(plan.items, planner))
        except Exception as error:  # dcp would wrap it in a page of text that names no machine
            self._error = error
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def seal(self) -> dict[str, Any]:
        """The file's entry in the manifest by its name; nothing if there was no tensor.

        Raises:
            OSError: it could not be written.
            MemoryError: a tensor could not be copied from its device or into one piece.
        """
        if self._error:
            raise self._error
        return {self._file.name: manifest.seal(self._file, self._digests)} if self._digests else {}

    def flush(self, flush: Callable[[Path], None] = manifest.sync) -> None:
        """Flush the file to the disk, or do what a place that is no disk does."""
        if self._digests:
            flush(self._file)

    def storage_meta(self) -> None:
        """Nothing: the manifest has it."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: the folder exists."""

    def prepare_local_plan(self, plan: "SavePlan") -> "SavePlan":
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: "list[SavePlan]") -> "list[SavePlan]":
        """The plans as they are."""
        return plans

    def finish(self, metadata: "Metadata", results: "list[list[WriteResult]]") -> None:
        """Nothing: each file says which parts it holds."""


def _contents(items: list[Any], planner: "SavePlanner") -> Iterator[memoryview]:
    """The header and the tensors of a file, whose items are dcp's `WriteItem`s."""
    # The largest elements first, so that all are aligned.
    items = sorted(items, key=lambda item: (-item.tensor_data.properties.dtype.itemsize, item.index.fqn))
    parts = {item.index.fqn: (item.tensor_data.properties.dtype, item.tensor_data.chunk) for item in items}
    assert len(parts) == len(items), "two parts of a tensor in one file"
    yield memoryview(private_api.shard_header(parts))
    for item in items:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        # One at a time on its way from a GPU, and into one piece: safetensors does not store strides.
        yield tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
