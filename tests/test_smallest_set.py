"""The smallest set: names of tensors, reduced metrics and warm-up, and with checkpoints, each in a folder of its own.

Which modules such a folder needs is read from their imports; docs/adapt.md names those that one asks for.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import floors, house
from tests.harness import runner

ALONE = ("keymap", "metrics", "schedule", "ranks")
WITH_CHECKPOINTS = (*ALONE, "checkpoint", "manifest", "shards")
MOST = {ALONE: 300, WITH_CHECKPOINTS: 670}  # lines of code

HEAD = """
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

{imports}

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
"""
TAIL = """
dist.destroy_process_group()
files = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "common"]
print(json.dumps({"found": found, "files": sorted(files)}))
"""
USE = """
factor = schedule.warmup_cosine(0, warmup_steps=4, max_steps=10)
lr = schedule.scale_rates(optimizer, factor)
loss = model(torch.ones(4, 3)).sum()
loss.backward()
optimizer.step()
means = metrics.means(metrics.add({"loss": torch.tensor(2.0), "count": torch.tensor(1)}, {"loss": torch.tensor(4.0),
                                   "count": torch.tensor(2)}))
tensors = keymap.tensors(model, optimizer)
found = {"lr": lr, "means": means, "names": sorted(tensors), "rank": ranks.rank(), "told": ranks.from_rank0(lambda: 7)}
"""
CHECKPOINT = """
partial, final = Path("run/checkpoints/step_00000003.tmp"), Path("run/checkpoints/step_00000003")
partial.mkdir(parents=True)
writer = shards.ShardWriter(partial, ranks.rank())
dcp.save(tensors, storage_writer=writer, planner=dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True))
files = writer.seal()
writer.flush()
manifest.write(partial, {"step": 3, "samples": 12}, files)
partial.rename(final)

wanted = {name: tensor.clone() for name, tensor in tensors.items()}
for tensor in tensors.values():
    tensor.zero_()
path, facts = checkpoint.choose(Path("run"))
checkpoint.load(path, tensors)
found |= {"same": {name: torch.equal(tensors[name], wanted[name]) for name in wanted}, "step": facts["step"]}
found["moves"] = any(tensor.any().item() for tensor in tensors.values())

file = final / next(iter(files))
content = bytearray(file.read_bytes())
content[-1] ^= 1
file.write_bytes(content)
try:
    checkpoint.choose(Path("run"))
except ValueError as error:
    found["refusal"] = str(error)
"""
TENSORS = ["0.bias", "0.weight", "1.bias", "1.weight"]


def take(names: tuple[str, ...], folder: Path) -> list[str]:
    """Copy modules, what they import and the packages around them into a folder; returns the copied modules."""
    known = floors.modules(house.ROOT)
    taken = floors.closure(house.ROOT, *names)
    packages = {".".join(module.split(".")[:depth]) for module in taken for depth in range(1, module.count(".") + 1)}
    for module in (*packages, *taken):
        path = folder / known[module].relative_to(house.ROOT)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(known[module], path)
    return sorted({*packages, *taken})


def run(folder: Path, names: tuple[str, ...], *parts: str) -> subprocess.CompletedProcess[str]:
    """Run a script beside the copies; the folder of a script comes before all others where Python looks."""
    asked = floors.find(house.ROOT, *names)
    imports = "\n".join(f"from {module.rpartition('.')[0]} import {module.rpartition('.')[2]}" for module in asked)
    (folder / "use.py").write_text("".join([HEAD.format(imports=imports), *parts, TAIL]))
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "RANK", "WORLD_SIZE"}}
    return subprocess.run(
        [sys.executable, "use.py"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=runner.HANG_S,
        check=False,
    )


@pytest.mark.parametrize("names", MOST, ids=["alone", "with checkpoints"])
def test_lines_of_code(names: tuple[str, ...], tmp_path: Path) -> None:
    sizes = house.sizes_of()
    taken = {module: sizes[module] for module in take(names, tmp_path)}
    listed = ", ".join(f"{module} {size}" for module, size in taken.items())
    assert sum(taken.values()) <= MOST[names], f"{sum(taken.values())} lines of code: {listed}"


@pytest.mark.parametrize("names", MOST, ids=["alone", "with checkpoints"])
def test_set_runs_alone(names: tuple[str, ...], tmp_path: Path) -> None:
    """In an otherwise empty folder it does its work, and takes nothing from this repository."""
    taken = take(names, tmp_path)
    result = run(tmp_path, names, USE, CHECKPOINT * (names == WITH_CHECKPOINTS))
    assert result.returncode == 0, result.stderr
    out = json.loads(result.stdout.splitlines()[-1])
    files = {str(path) for path in (tmp_path / "common").rglob("*.py")}
    assert {*out["files"]} == files
    assert len(files) == len(taken)

    found = out["found"]
    assert found["lr"] == 0.1  # 0.5, of which the first of five steps of warm-up has a fifth
    assert found["means"] == {"loss": 2.0}
    assert (found["rank"], found["told"]) == (0, 7)
    buffers = [f"1.{name}" for name in ("num_batches_tracked", "running_mean", "running_var")]
    momenta = [f"optimizer.{name}.momentum_buffer" for name in TENSORS]
    assert found["names"] == sorted([*TENSORS, *buffers, *momenta])
    if names == WITH_CHECKPOINTS:
        assert found["same"] == dict.fromkeys(found["names"], True)
        assert (found["step"], found["moves"]) == (3, True)
        assert "has changed since it was written" in found["refusal"]


def test_set_without_a_module_does_not_run(tmp_path: Path) -> None:
    """The mutant: Python does not take the missing module from this repository."""
    take(ALONE, tmp_path)
    (tmp_path / "common" / "ranks.py").unlink()
    result = run(tmp_path, ALONE, USE)
    assert result.returncode != 0
    assert "ImportError" in result.stderr, result.stderr


def test_page_names_the_set() -> None:
    text = (house.ROOT / "docs" / "adapt.md").read_text()
    places = [module.removeprefix("common.").replace(".", "/") for module in floors.find(house.ROOT, *WITH_CHECKPOINTS)]
    assert [place for place in places if f"`{place}`" not in text] == []
