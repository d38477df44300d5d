"""Checkpoints to test with, of every type and layout that a recipe saves; and whether two of them hold the same."""

import re
from pathlib import Path
from typing import Any

import torch
from common.run.process import Process
from common.state import checkpoint, saver, start, state_check
from common.store import disk
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from tests.harness import runner
from tests.harness.damage import flip_data

RECIPE = runner.ROOT / "recipes" / "some_recipe" / "train.py"  # only its name matters


def make_state(content: int) -> dict[str, torch.Tensor]:
    """Every type and layout that a recipe saves, and the bits that a conversion would lose."""
    generator = torch.Generator().manual_seed(content)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    odd = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45])
    return {
        "conv.weight": normal(6, 3, 3, 3).float().to(memory_format=torch.channels_last),
        "linear.weight": normal(5, 7).t(),
        "half.weight": torch.cat([normal(50), odd.double()]).bfloat16(),
        "wide.weight": normal(4, 1),
        "odd": odd,
        "norm.running_mean": normal(8).float(),
        "norm.num_batches_tracked": torch.tensor(2**40 + content),
        "ids": torch.tensor([content, -1, 2**31 - 1], dtype=torch.int32),
        "optimizer.conv.weight.step": torch.tensor(float(content)),
        "optimizer.conv.weight.exp_avg": normal(6, 3, 3, 3).float().to(memory_format=torch.channels_last),
    }


def blank(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Where to load to: other values in the same layouts."""
    return {name: torch.full_like(tensor, 77) for name, tensor in state.items()}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def check_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].stride() == tensor.stride(), name
        assert bits(found[name]) == bits(tensor), name


def loaded(path: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = blank(like)
    checkpoint.load(path, found)
    return found


def make_saver(run_dir: Path, keep: int = 9, in_background: bool = False, has_one: bool = True) -> saver.Saver:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
    check = state_check.StateCheck(torch.nn.Module(), compare=True)
    found = start.Found(disk.Disk(run_dir), {"seed": 3}, None, {}, newest=0 if has_one else -1)
    return saver.Saver(found, mesh, check, Process(recipe=str(RECIPE)), keep, in_background)


def save(run_dir: Path, step: int, keep: int = 9) -> Path:
    make_saver(run_dir, keep).save(step, make_state(step), 10 * step, last=True)
    return checkpoint.folder(run_dir, step)


def steps(run_dir: Path) -> list[int]:
    """Of the committed checkpoints; anything else there must be `latest` or `best`."""
    names = {path.name for path in (run_dir / "checkpoints").iterdir()} - {"latest", "best"}
    return sorted(int(name.removeprefix("step_")) for name in names)


def find(run_dir: Path, resume: str = "", model: torch.nn.Module | None = None, **facts: Any) -> start.Found:
    """`start.find` for the run in a folder."""
    return start.find(str(run_dir.parent), run_dir.name, resume, model, **facts)


def find_step(run_dir: Path, resume: str = "") -> int:
    found = find(run_dir, resume, seed=3)
    assert found.path is not None
    step = found.progress["step"]
    assert found.progress["samples"] == 10 * step
    assert found.path.name == f"step_{step:08d}"
    return step


def damage(run_dir: Path, step: int) -> None:
    flip_data(checkpoint.folder(run_dir, step))


def tensors(path: Path, but: str | tuple[str, ...] = "nothing.") -> dict[tuple[str, str], torch.Tensor]:
    """All that a checkpoint holds by file and name, without the names that begin with `but`.

    In a store, a file's name has an end of its own, of the save that has written it.
    """
    return {
        (re.sub(r"-[0-9a-f]{8}(?=\.safetensors$)", "", file.name), name): tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
        if not name.startswith(but)
    }


def same_tensors(one: Path, other: Path, but: str | tuple[str, ...] = "nothing.") -> bool:
    """Whether two checkpoints of the same number of ranks hold the same names and bits; see `tensors`."""
    ours, theirs = tensors(one, but), tensors(other, but)
    assert ours, f"{one} holds nothing"
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
