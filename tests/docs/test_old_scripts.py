"""What old scripts do under the installed torch, and that what docs/porting.md has instead does the same."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch.ports import free_port
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.harness import runner
from tests.launch.test_launch import TORCHRUN, shell

# One training in three forms: rank 0 prints the weights. The lines between are what changes. Ranks share a pipe, and
# `print` writes each word by itself where Python's output is unbuffered, as under torchrun: a line is written whole.
SAY = """
import os


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

"""
BODY = (
    SAY
    + """

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train(rank, size):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step * size + rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        say("weights", model.module.weight.tolist())
    dist.destroy_process_group()

"""
)
OLD = (
    BODY
    + """
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", default=-1)
args = parser.parse_args()
say("local_rank", repr(args.local_rank))
if args.local_rank == -1:
    say("trains alone")
else:
    dist.init_process_group("gloo", init_method="env://")
    train(dist.get_rank(), dist.get_world_size())
"""
)
SPAWN = (
    BODY
    + """
import sys

import torch.multiprocessing as mp


def worker(rank, size):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", sys.argv[1]
    dist.init_process_group("gloo", rank=rank, world_size=size)
    train(rank, size)


if __name__ == "__main__":
    mp.spawn(worker, args=(2,), nprocs=2)
"""
)
NEW = (
    BODY
    + """
say("local_rank", int(os.environ["LOCAL_RANK"]))
dist.init_process_group("gloo")
train(dist.get_rank(), dist.get_world_size())
"""
)
BOTH = ('"--local_rank"', '"--local-rank", "--local_rank"')
LAUNCH = (sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2")


def said(folder: Path, text: str, *command: str | Path, **variables: str) -> tuple[int, str]:
    """Exit code and words of a script that is started so."""
    (folder / "script.py").write_text(text)
    words = [folder / "script.py" if word == "SCRIPT" else word for word in command]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | variables
    result = shell(words, **where)
    return result.returncode, result.stdout + result.stderr


def weights(words: str) -> list[float]:
    (line,) = re.findall(r"weights \[\[(.*?)\]\]", words)
    return [float(number) for number in line.split(", ")]


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The weights of the form of today, started by torchrun."""
    code, words = said(tmp_path_factory.mktemp("new"), NEW, TORCHRUN, "--standalone", "--nproc-per-node=2", "SCRIPT")
    assert code == 0, words
    assert sorted(re.findall(r"local_rank (\d)", words)) == ["0", "1"]
    return weights(words)


def test_launch_passes_a_flag_that_the_script_refuses(tmp_path: Path) -> None:
    """With a dash, since torch 2.0: argparse knows the spelling with an underscore alone."""
    code, words = said(tmp_path, OLD, *LAUNCH, "SCRIPT")
    assert code
    assert "unrecognized arguments: --local-rank=0" in words
    assert "torch.distributed.launch is deprecated" in words


def test_launch_trains_where_both_spellings_are_known(tmp_path: Path, new: list[float]) -> None:
    """The rank is a string there, and the training is the one of torchrun."""
    code, words = said(tmp_path, OLD.replace(*BOTH), *LAUNCH, "SCRIPT")
    assert code == 0, words
    assert sorted(re.findall("local_rank (.*)", words)) == ["'0'", "'1'"]
    assert weights(words) == new


def test_torchrun_passes_no_flag(tmp_path: Path) -> None:
    """So the old script sees its default, -1, and takes itself for the only process: twice, without an error."""
    code, words = said(tmp_path, OLD, TORCHRUN, "--standalone", "--nproc-per-node=2", "SCRIPT")
    assert code == 0, words
    assert words.count("local_rank -1\n") == words.count("trains alone") == 2
    assert "weights" not in words


def test_spawn_trains_as_torchrun(tmp_path: Path, new: list[float]) -> None:
    code, words = said(tmp_path, SPAWN, sys.executable, "SCRIPT", str(free_port()))
    assert code == 0, words
    assert weights(words) == new


VISIBLE = SAY + 'say("rank", os.environ["LOCAL_RANK"], "sees", os.environ["CUDA_VISIBLE_DEVICES"])'


def test_visible_devices_reach_every_rank(tmp_path: Path) -> None:
    """torchrun hands the variable on as it is: each rank sees all of its GPUs, and counts them from 0."""
    command = (TORCHRUN, "--standalone", "--nproc-per-node=2", "SCRIPT")
    code, words = said(tmp_path, VISIBLE, *command, CUDA_VISIBLE_DEVICES="2,3")
    assert code == 0, words
    assert sorted(re.findall(r"rank \d sees .*", words)) == ["rank 0 sees 2,3", "rank 1 sees 2,3"]


def test_local_rank_must_be_a_number() -> None:
    with pytest.raises(TypeError, match="must be int, not str"):
        torch.device("cuda", "0")  # type: ignore[call-overload]
    assert torch.device("cuda", int("0")).index == 0


# --- in two processes: how a group is made ------------------------------------------------------------------------


def groups(folder: str, port: int) -> None:
    """Each method gives the same group."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    methods: dict[str, dict[str, Any]] = {
        "none": {},
        "env": {"init_method": "env://"},
        "tcp": {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": size},
        "file": {"init_method": f"file://{folder}/meet", "rank": rank, "world_size": size},
    }
    for name, method in methods.items():
        dist.init_process_group("gloo", **method)
        numbers = torch.tensor([1.0, rank])
        dist.all_reduce(numbers)
        print(name, numbers.tolist(), flush=True)
        dist.destroy_process_group()
    for name in ("tcp", "file"):  # neither knows the rank
        try:
            dist.init_process_group("gloo", init_method=methods[name]["init_method"])
        except ValueError as error:
            print(name, "refused", str(error).split("missing")[-1], flush=True)


def test_methods_meet_alike(tmp_path: Path) -> None:
    result = runner.spawn(groups, [(str(tmp_path), free_port())] * 2)
    assert result.ok, str(result)
    for words in result.outputs:
        assert all(f"{name} [2.0, 1.0]" in words for name in ("none", "env", "tcp", "file")), words
        assert all(f"{name} refused" in words for name in ("tcp", "file")), words


# --- where models and files lie ------------------------------------------------------------------------------------


def test_ddp_takes_no_list_of_devices(group: None) -> None:
    """device_ids is at most the one GPU on which the model lies, with output_device beside it: neither for a CPU."""
    for given in ({"device_ids": [0]}, {"device_ids": [0], "output_device": 0}):
        with pytest.raises(ValueError, match="device_ids and output_device arguments only work with"):
            DistributedDataParallel(nn.Linear(2, 2), **given)
    with pytest.raises(ValueError, match="device_ids can only be None or contain a single element"):
        DistributedDataParallel(nn.Linear(2, 2), device_ids=[0, 1])
    model = DistributedDataParallel(nn.Linear(2, 2))
    assert model.device_ids is None is model.output_device


def test_dataparallel_wants_the_model_on_its_first_device() -> None:
    """Without GPUs device_ids is ignored; with them, the model must lie on the first, wherever that is."""
    model = nn.DataParallel(nn.Linear(2, 2), device_ids=[1, 0])
    assert model(torch.ones(1, 2)).shape == (1, 2)
    assert model.device_ids == []
    model.device_ids, model.src_device_obj = [1, 0], torch.device("cuda:1")  # as a machine with two GPUs sets them
    with pytest.raises(RuntimeError, match=r"on device cuda:1 \(device_ids\[0\]\) but found one of them on .*cpu"):
        model(torch.ones(1, 2))


def test_map_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dict moves what it names and nothing else; "cpu" moves all. The file is one of cuda:0."""
    place: Callable[[Any], str] = lambda storage: "cuda:0"  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", place)
        torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(RuntimeError, match="Attempting to deserialize object on a CUDA device"):
        torch.load(tmp_path / "model.pt", weights_only=True)
    with pytest.raises(RuntimeError, match="Attempting to deserialize object on a CUDA device"):
        torch.load(tmp_path / "model.pt", weights_only=True, map_location={"cuda:1": "cpu"})
    for where in ({"cuda:0": "cpu"}, "cpu"):
        found = torch.load(tmp_path / "model.pt", weights_only=True, map_location=where)
        assert found["weight"].tolist() == [1, 1]
