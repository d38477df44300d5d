"""The private parts of torch that a checkpoint's files need do what they are there for."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common.state import checkpoint, private_api, shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.harness import runner, states

TYPES = [dtype for dtype in safetensors.torch._TYPES.values() if "float4" not in str(dtype)]  # which has two in a byte


def make_parts(rank: int) -> dict[str, torch.Tensor]:
    """Of each type; some without elements, dimensions or order in memory."""
    parts = {f"{dtype}": (torch.arange(24) % 2 + rank).view(2, 3, 4).to(dtype).transpose(0, 2) for dtype in TYPES}
    parts |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(7.0 + rank), 'a "name" of é': torch.ones(3)}
    return {f"{name} of rank {rank}": tensor for name, tensor in parts.items()}


def write_parts(folder: str, one_by_one: bool) -> None:
    """A file of each rank, and a tensor that is split over both; they are read as torch's own files are."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(15.0).view(5, 3)
    split = distribute_tensor(whole, mesh, [Shard(0)])
    own = make_parts(rank)
    Path(folder).mkdir(exist_ok=True)
    writer: Any = shards.ShardWriter(Path(folder), rank)
    if not one_by_one:
        writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True)
        own = {name: tensor.contiguous() for name, tensor in own.items()}
    dcp.save({**own, "split": split}, storage_writer=writer)
    mine = private_api.files_of_rank(Path(folder), rank)
    assert [file.name for file in mine] == [private_api.file_of_rank(rank)]
    dist.barrier()
    assert len([*Path(folder).glob("*.safetensors")]) == 2
    wanted = make_parts(0) | make_parts(1) | {"split": whole}
    found = {name: torch.empty_like(tensor) for name, tensor in wanted.items()}
    assert {name: entry.shape for name, entry in checkpoint.tensors_in(Path(folder)).items()} == {
        name: tensor.shape for name, tensor in wanted.items()
    }
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(folder))
    states.check_equal(found, wanted)
    whole_file = safetensors.torch.load_file(mine[0])
    assert whole_file.keys() == own.keys() | {"split"}
    dist.destroy_process_group()


@pytest.mark.parametrize("one_by_one", [True, False], ids=["ours", "torch's"])
def test_files_of_a_rank(one_by_one: bool, tmp_path: Path) -> None:
    """torch's reader and safetensors read our files as they read those of torch's writer, which have the same names."""
    result = runner.spawn(write_parts, [(str(tmp_path / "saved"), one_by_one)] * 2)
    assert result.ok, str(result)
    assert private_api.files_of_rank(tmp_path / "saved", 2) == []
