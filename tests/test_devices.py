"""How the devices compute: what the flags set, what the terminal says of it, and that they break no recipe."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from common import devices

from tests.conftest import each_recipe
from tests.harness import mutants, runner

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    devices.configure("highest", False)


@pytest.mark.parametrize(("precision", "tf32"), [("highest", False), ("high", True), ("medium", True)])
def test_convolutions_follow_the_matrix_products(precision: str, tf32: bool) -> None:
    """torch's own default is TF32 for convolutions, and float32 for matrices."""
    devices.configure(precision, False)
    assert torch.get_float32_matmul_precision() == precision
    assert torch.backends.cuda.matmul.allow_tf32 == tf32
    assert torch.backends.cudnn.allow_tf32 == tf32


def test_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    devices.configure("highest", True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.backends.cudnn.benchmark
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    devices.configure("highest", True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8", "the user's choice"


def test_not_deterministic_again() -> None:
    """A process may train twice: --on-bad-state rewind, and the processes of the tests."""
    devices.configure("medium", True)
    devices.configure("highest", False)
    assert torch.backends.cudnn.benchmark
    assert "CUBLAS_WORKSPACE_CONFIG" in os.environ, "harmless, and cuBLAS has read it"
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    assert list(devices.notes(CPU, compiled=False)) == []


def test_notes() -> None:
    devices.configure("highest", False)
    settings, compiling = devices.notes(GPU, compiled=False)
    assert settings == "devices  float32 matmul precision highest, cudnn.benchmark on"
    assert compiling.startswith("note: without --compile, ")
    assert (runner.ROOT / "docs" / "gpu.md").is_file(), "which the note names"
    devices.configure("high", True)
    everything = "float32 matmul precision high, cudnn.benchmark off, deterministic algorithms only"
    assert list(devices.notes(GPU, compiled=True)) == [f"devices  {everything}"]
    devices.configure("highest", True)
    assert list(devices.notes(CPU, compiled=False)) == ["devices  deterministic algorithms only"]


def first_losses(recipe: str | Path, name: str, data: Path | None, out: Path, *flags: str) -> tuple[dict, str]:
    """Losses of two steps, and what the run has printed."""
    kind = recipe if isinstance(recipe, str) else recipe.parent.name
    where = ["--out", str(out), "--name", name, *(["--data", str(data)] if data else [])]
    size = () if data is None else ("--global-batch-size", "8")
    steps = ("--max-steps", "2", "--log-every", "1", "--check-every", "0", "--dtype", "float32")
    layout = runner.layout(kind, 2)
    result = runner.run_recipe(recipe, layout.size, *runner.small(kind), *layout.flags, *size, *steps, *where, *flags)
    assert result.ok, str(result)
    return runner.records(out / name, runner.curve(kind)), result.outputs[0]


@pytest.mark.parametrize("recipe", each_recipe())
def test_a_recipe_can_be_deterministic(recipe: str, small_data: dict[str, Path], tmp_path: Path) -> None:
    """On a CPU it changes nothing but the line that says so; the mutant is a recipe that forgets to ask for it."""
    data = small_data.get(runner.workload(recipe))
    plain, _ = first_losses(recipe, "plain", data, tmp_path)
    flags = ("--deterministic", "--matmul-precision", "high")
    said = "devices  float32 matmul precision high, deterministic algorithms only"
    if recipe == "ddp_resnet":  # first, because ranks are used again
        asks = {"main": {"devices.configure(args.matmul_precision, args.deterministic)": "None"}}
        mutant = mutants.mutate(recipe, tmp_path, asks)
        assert said not in first_losses(mutant, "mutant", data, tmp_path, *flags)[1]
    found, printed = first_losses(recipe, "same", data, tmp_path, *flags)
    assert found == plain
    assert said in printed


# --- no memory left ---------------------------------------------------------------------------------------


def explained(error: BaseException) -> str:
    devices.explain_out_of_memory(error)
    return "\n".join(getattr(error, "__notes__", []))


def test_gpu_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's message has the numbers; the rank and the flags are ours."""
    monkeypatch.setattr(devices, "frees", ["--micro-batch-size smaller (now 8)", "--recompute full (now none)"])
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    wanted = (
        "rank 3 is out of memory. It takes less with: --micro-batch-size smaller (now 8); --recompute full (now none); "
        "more devices, in a recipe that gives each a part of the model (README.md, Which recipe?)"
    )
    said = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.10 GiB of which ..."
    assert explained(torch.OutOfMemoryError(said)) == wanted


def test_cpu_without_memory() -> None:
    """What torch raises for real; the mutant is another error, which gets no advice."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    said = explained(raised.value)
    found = re.fullmatch(
        r"rank 0 is out of memory \(([\d.]+) of ([\d.]+) GiB of this machine's memory are free\)\. .*", said
    )
    assert found, said
    assert 0 < float(found[1]) <= float(found[2])
    assert "tried to allocate 4503599627370496 bytes" in str(raised.value)
    assert explained(RuntimeError("shapes differ")) == ""


def test_cause_without_memory() -> None:
    """torch wraps what a stage of a pipeline raises: the note stands with the cause, and Python prints both."""
    cause = torch.OutOfMemoryError("CUDA out of memory.")
    error = RuntimeError("stage 1 failed")
    error.__cause__ = cause
    assert explained(error) == ""
    assert cause.__notes__[0].startswith("rank 0 is out of memory")


def test_recipe_without_memory(small_text: Path, tmp_path: Path) -> None:
    """Every rank learns which one it was, and which flags of the recipe help: those that do not stand there yet."""
    saves = "run.save(step)"
    fills = f"if step == 2 and world.rank == 1: torch.empty(2**50)\n{saves}"
    path = mutants.mutate("fsdp_gpt", tmp_path, {"main": {saves: fills}})
    where = ("--data", str(small_text), "--out", str(tmp_path / "runs"), "--name", "run")
    flags = (*runner.small("fsdp_gpt"), "--max-steps", "3", "--global-batch-size", "8", "--micro-batch-size", "2")
    result = runner.run_recipe(path, 2, *flags, *where)
    assert not result.ok
    smaller = "--micro-batch-size smaller, where 0 is the largest (now 2)"
    for output in result.outputs[0], (tmp_path / "runs" / "run" / "logs" / "rank_00001.log").read_text():
        assert "DefaultCPUAllocator: can't allocate memory" in output, output
        assert re.search(r"\nrank 1 is out of memory \([^)]*\)\. It takes less with: ", output), output
        assert f"{smaller}; --recompute full (now none); more devices" in output, output
