"""How the devices compute: what the flags set, what the terminal says of it, and that they break no recipe."""

import os
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
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
    assert list(devices.notes(CPU, torch.float32, compiled=False)) == []


def test_notes() -> None:
    devices.configure("highest", False)
    settings, compiling = devices.notes(GPU, torch.float32, compiled=False)
    assert settings == "devices  float32 matmul precision highest, cudnn.benchmark on"
    assert compiling.startswith("note: without --compile, ")
    assert (runner.ROOT / "docs" / "gpu.md").is_file(), "which the note names"
    devices.configure("high", True)
    everything = "float32 matmul precision high, cudnn.benchmark off, deterministic algorithms only"
    assert list(devices.notes(GPU, torch.float32, compiled=True)) == [f"devices  {everything}"]
    devices.configure("highest", True)
    assert list(devices.notes(CPU, torch.float32, compiled=False)) == ["devices  deterministic algorithms only"]


@pytest.mark.parametrize(("dtype", "native"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)])
def test_says_that_bfloat16_is_emulated(dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it was asked for, and on a GPU as well: a V100 computes in float16 alone."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": native})
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native or including_emulation)
    devices.configure("highest", False)
    for device in (CPU, GPU):
        said = [line for line in devices.notes(device, dtype, compiled=True) if "emulates bfloat16" in line]
        assert bool(said) == (dtype == torch.bfloat16 and not native)


def forget(path: str, argv: list[str]) -> None:
    """Run a recipe whose start does not ask for what the flags say."""
    real = devices.configure
    devices.configure = lambda *_: None
    try:
        runner.run_path(path, argv)
    finally:
        devices.configure = real


def first_losses(
    kind: str, name: str, data: Path | None, out: Path, *flags: str, target: Callable[[str, list[str]], None]
) -> tuple[dict, str]:
    """Losses of two steps of a recipe, and what the run has printed."""
    where = ["--out", str(out), "--name", name, *(["--data", str(data)] if data else [])]
    size = () if data is None else ("--global-batch-size", "8")
    steps = ("--max-steps", "2", "--log-every", "1", "--check-every", "0", "--dtype", "float32")
    layout = runner.layout(kind, 2)
    every = (*runner.small(kind), *layout.flags, *size, *steps, *where, *flags)
    result = runner.run_recipe(kind, layout.size, *every, target=target)
    assert result.ok, str(result)
    return runner.records(out / name, runner.curve(kind)), result.outputs[0]


@pytest.mark.parametrize("recipe", each_recipe())
def test_a_recipe_can_be_deterministic(recipe: str, small_data: dict[str, Path], tmp_path: Path) -> None:
    """On a CPU it changes nothing but the line that says so; the mutant is a start that forgets to ask for it."""
    data = small_data.get(runner.workload(recipe))
    plain, _ = first_losses(recipe, "plain", data, tmp_path, target=runner.run_path)
    flags = ("--deterministic", "--matmul-precision", "high")
    said = "devices  float32 matmul precision high, deterministic algorithms only"
    if recipe == "ddp_resnet":  # first, because ranks are used again
        assert said not in first_losses(recipe, "mutant", data, tmp_path, *flags, target=forget)[1]
    found, printed = first_losses(recipe, "same", data, tmp_path, *flags, target=runner.run_path)
    assert found == plain
    assert said in printed


# --- no memory left ---------------------------------------------------------------------------------------


FREES = ["--micro-batch-size smaller (now 8)", "--recompute full (now none)"]


def explained(error: BaseException, frees: Sequence[str] = (), owners: tuple[Callable[[], object], ...] = ()) -> str:
    devices.explain_out_of_memory(error, [*frees], owners)
    return "\n".join(getattr(error, "__notes__", []))


def test_gpu_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's message has the numbers; the rank and the flags are ours."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    wanted = (
        "rank 3 is out of memory. It takes less with, in this order: --micro-batch-size smaller (now 8); "
        "--recompute full (now none); more devices, in a recipe that gives each a part of the model (README.md, Which "
        "recipe?)"
    )
    said = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.10 GiB of which ..."
    assert explained(torch.OutOfMemoryError(said), FREES) == wanted


def test_cpu_without_memory() -> None:
    """What torch raises for real; the mutant is another error, which gets no advice."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    said = explained(raised.value)
    assert said.startswith("rank 0 is out of memory. It takes less with, in this order: more devices, in a recipe")
    assert "tried to allocate 4503599627370496 bytes" in str(raised.value)
    assert explained(RuntimeError("shapes differ")) == ""


HOLDS = re.compile(
    r"It holds, in GiB: parameters ([\d.]+), gradients ([\d.]+), optimizer state ([\d.]+), "
    r"activations and the rest ([\d.]+)\."
)


def without_memory(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> str:
    """The note of a real MemoryError while the activations of a forward pass are there."""
    activations = model(torch.ones(batch, 4096))
    with pytest.raises(MemoryError) as raised:
        bytearray(2**60)
    assert activations.requires_grad
    return explained(raised.value, ["--micro-batch-size smaller"], (weakref.ref(model), weakref.ref(optimizer)))


def test_what_holds_the_memory() -> None:
    """Counted by storages, so a tied weight counts once; the mutant is not tied. What holds most comes first."""
    first, second = torch.nn.Linear(4096, 4096, bias=False), torch.nn.Linear(4096, 4096, bias=False)
    model = torch.nn.Sequential(first, second)
    mutant = without_memory(model, torch.optim.AdamW(model.parameters()), 1)
    second.weight = first.weight  # 64 MiB
    optimizer = torch.optim.AdamW(model.parameters())
    said = without_memory(model, optimizer, 1)
    found = HOLDS.search(said)
    assert found, said
    assert found.groups()[:3] == ("0.06", "0.00", "0.00")
    assert "parameters 0.12" in mutant
    model(torch.ones(1, 4096)).sum().backward()
    optimizer.step()
    before = float(HOLDS.search(without_memory(model, optimizer, 1))[4])
    said = without_memory(model, optimizer, 2**14)  # the input and two layers' results: 768 MiB
    found = HOLDS.search(said)
    assert found, said
    assert found.groups()[:3] == ("0.06", "0.06", "0.13")
    assert 0.7 < float(found[4]) - before < 0.9, (before, said)
    assert "in this order: --micro-batch-size smaller; more devices" in said
    large = torch.optim.SGD([torch.nn.Parameter(torch.empty(2**33, device="meta"))])  # 32 GiB, more than the rest
    assert "Which recipe?); --micro-batch-size smaller" in without_memory(model, large, 1), (
        "states are split, not freed"
    )


def test_explanation_never_raises() -> None:
    """A model without its methods stands for any odd one: the advice stays, and so does the error."""
    said = explained(MemoryError(), owners=(lambda: None, lambda: None))
    assert said.startswith("rank 0 is out of memory. It takes less")
    assert "It holds" not in said
    assert said.endswith("README.md, Which recipe?)")


def test_cause_without_memory() -> None:
    """torch wraps what a stage of a pipeline raises: the note stands with the cause, and Python prints both."""
    cause = torch.OutOfMemoryError("CUDA out of memory.")
    error = RuntimeError("stage 1 failed")
    error.__cause__ = cause
    assert explained(error) == ""
    assert cause.__notes__[0].startswith("rank 0 is out of memory")


# Where memory ends in step 2 of rank 1, for real, by the phase that the terminal must name.
FULL = "torch.empty(2**50)"
PHASES = {
    "forward": f"model.register_forward_pre_hook(lambda *_: {FULL})",
    "backward": f"model.register_forward_hook(lambda m, i, out: out.register_hook(lambda *_: {FULL}) and None)",
    "optimizer": f"optimizer.register_step_pre_hook(lambda *_: {FULL})",
    "save": f"torch.Tensor.contiguous = lambda *_: {FULL}",
}


@pytest.mark.parametrize("phase", PHASES)
def test_recipe_without_memory(phase: str, small_text: Path, tmp_path: Path) -> None:
    """Every rank learns which one it was, when, what holds its memory, and which flags help that are not set yet."""
    train = "sums, grad_norm = train_step(args, model, optimizer, run.finite, batches, dp_size)"
    before = "run.save(step)" if phase == "save" else train
    fills = f"if step == 2 and world.rank == 1:\n    {PHASES[phase]}\n{before}"
    path = mutants.mutate("fsdp_gpt", tmp_path, {"main": {before: fills}})
    where = ("--data", str(small_text), "--out", str(tmp_path / "runs"), "--name", "run", "--save-every", "2")
    flags = (*runner.small("fsdp_gpt"), "--max-steps", "3", "--global-batch-size", "8", "--micro-batch-size", "2")
    result = runner.run_recipe(path, 2, *flags, *where)
    assert not result.ok
    smaller = "--micro-batch-size smaller, where 0 is the largest (now 2)"
    outputs = [result.outputs[0], (tmp_path / "runs" / "run" / "logs" / "rank_00001.log").read_text()]
    failed = rf"^rank 1 \(host .*, step 2\) failed in {phase}: RuntimeError: "
    if phase == "save":  # all ranks agree that it failed, so rank 0 alone prints it
        del outputs[1]
        failed = "^error: the first checkpoint was not saved: no checkpoint of step 2: rank 1 on .*: RuntimeError: "
    for output in outputs:
        assert re.search(failed, output, re.MULTILINE), output
        assert "DefaultCPUAllocator: can't allocate memory" in output, output
        assert re.search(r"\brank 1 is out of memory\. It holds, in GiB: parameters 0\.00", output), output
        assert f"in this order: {smaller}; --recompute full (now none); more devices" in output, output
