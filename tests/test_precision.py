"""What is computed in follows the hardware, and what is stored never loses bits."""

import contextlib
import json
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from common import UserError, precision
from common.workloads import gpt

from tests.harness import module, mutants, runner

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_pick_dtype() -> None:
    for name in ("float32", "float64", "bfloat16", "float16"):
        assert precision.compute_dtype(name, CPU) == getattr(torch, name)
    with pytest.raises(UserError, match=r"--dtype float8 is unknown: use auto, float32, bfloat16, float16, float64"):
        precision.compute_dtype("float8", CPU)


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
    assert precision.compute_dtype("auto", CPU) == wanted


@pytest.mark.parametrize(("native", "wanted"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_dtype_on_a_gpu(native: bool, wanted: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # A V100 emulates bfloat16, slower than float32.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native or including_emulation)
    assert precision.compute_dtype("auto", GPU) == wanted


def test_autocast() -> None:
    """Matrices in bfloat16 if that is asked for, and nothing else is touched: not on meta, which computes nothing."""
    layer, x = torch.nn.Linear(4, 3), torch.ones(2, 4)
    for dtype, wanted in ((torch.float32, torch.float32), *((half, half) for half in precision.HALVES)):
        with precision.autocast(CPU, dtype):
            assert layer(x).dtype == wanted
        assert layer(x).dtype == torch.float32, "over at the end"
    with precision.autocast(CPU, torch.bfloat16):
        assert torch.nn.functional.cross_entropy(layer(x), torch.zeros(2, dtype=torch.int64)).dtype == torch.float32
    with precision.autocast(CPU, torch.float64):
        assert layer.double()(x.double()).dtype == torch.float64
    with precision.autocast(torch.device("meta"), torch.bfloat16):
        assert layer.to("meta")(x.double().to("meta")).dtype == torch.float64


def test_storage() -> None:
    assert precision.param_dtype(torch.bfloat16) == torch.float32
    assert precision.param_dtype(torch.float32) == torch.float32
    assert precision.param_dtype(torch.float64) == torch.float64


class Seen(torch.nn.Module):
    """Notes in which thread it computes, and in which type."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.types: set[torch.dtype] = set()
        self.threads: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.types.add(y.dtype)
        self.threads.add(threading.get_ident())
        return y


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("mutant", [False, True], ids=["", "mutant: nn.DataParallel alone"])
def test_threads_of_data_parallel_compute_in_the_type_asked_for(mutant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own threads, with the CPU in the place of GPUs: its autocast's default is bfloat16, theirs float16."""
    apply = sys.modules["torch.nn.parallel.parallel_apply"]
    enabled = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cpu": enabled(device))
    monkeypatch.setattr(apply, "_get_device_index", lambda device, _: device)
    for name, value in {
        "is_available": lambda: True,
        "current_accelerator": lambda: CPU,
        "current_stream": lambda _: contextlib.nullcontext(),
        "device_index": lambda _: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.accelerator, name, value)
    recipe = module.load("dp_resnet")
    args = recipe.Args(dtype="float16")
    model = Seen()
    wrapped = recipe.parallelize(args, model, recipe.make_mesh(args, types.SimpleNamespace(size=1, device=CPU)), CPU)
    wrapped.device_ids = [0, 1]
    if mutant:
        del wrapped.parallel_apply
    replicas = [model._replicate_for_data_parallel() for _ in range(2)]
    for replica in replicas:
        replica.layer = model.layer
    x = torch.ones(2, 4)
    with precision.autocast(CPU, torch.float16):
        outputs = wrapped.parallel_apply(replicas, [(x,), (x,)], [{}, {}])
    assert len(outputs) == 2
    assert threading.get_ident() not in model.threads
    assert model.types == {torch.bfloat16 if mutant else torch.float16}


def note_types(path: str, argv: list[str], file: str) -> None:
    """In a rank: run a recipe; note under which autocast, and on weights of which type, its MLPs compute."""
    real, seen = gpt.Mlp.forward, set()

    def forward(self: gpt.Mlp, x: torch.Tensor) -> torch.Tensor:
        seen.add((torch.is_autocast_enabled("cpu"), str(self.gate.weight.dtype)))
        return real(self, x)

    gpt.Mlp.forward = forward  # type: ignore[method-assign]
    runner.run_unmeasured(path, argv)
    Path(file).write_text(json.dumps(sorted(seen)))


BESIDE = "model.forward = torch.autocast(device.type, enabled=False)(model.forward)"


@pytest.mark.parametrize("recipe", [name for name in runner.RECIPES if BESIDE in runner.source(name)])
def test_one_thing_alone_chooses_types(recipe: str, small_text: Path, tmp_path: Path) -> None:
    """Not autocast over FSDP's policy: on GPUs, each norm would become float32, and be cast back for each reader.

    CPUs have no such rule for norms, so here both give the same bits, and it is the mutant that tells.
    """
    mutant = mutants.mutate(recipe, tmp_path, {"parallelize": {BESIDE: "pass"}})
    argv = [*runner.SMALL["gpt"], "--data", str(small_text), "--dtype", "bfloat16", "--max-steps", "3"]
    argv += ["--log-every", "1", "--out", str(tmp_path), "--name"]
    itself = runner.ROOT / "recipes" / recipe / "train.py"
    for name, path, wanted in (("recipe", itself, False), ("mutant", mutant, True)):
        files = [tmp_path / f"{name}{rank}" for rank in range(2)]
        result = runner.spawn(note_types, [(str(path), [str(path), *argv, name], str(file)) for file in files])
        assert result.ok, str(result)
        assert [json.loads(file.read_text()) for file in files] == [[[wanted, "torch.bfloat16"]]] * 2
    for tag in ("train/loss", "train/grad_norm", "val/loss"):
        assert runner.records(tmp_path / "recipe", tag) == runner.records(tmp_path / "mutant", tag)
