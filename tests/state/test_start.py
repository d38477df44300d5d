"""--init begins with the weights that fit, from whatever holds them, under every strategy; the rest stays random."""

import argparse
import itertools
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchvision
from common import UserError, keymap
from common.state import checkpoint, start
from common.workloads import pretrained
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import format_utils
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.harness import own, runner
from tests.harness.states import make_saver, save


def make_model(classes: int, run_seed: int = 0) -> nn.Sequential:
    torch.manual_seed(run_seed)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, classes))


def backbone(run_seed: int = 0) -> dict[str, torch.Tensor]:
    found = make_model(7, run_seed).state_dict()
    found["1.running_mean"] += 3
    return found


KINDS = {
    "safetensors": lambda tensors, path: save_file(tensors, path / "model.safetensors"),
    "folder": lambda tensors, path: save_file(tensors, path / "model-00001-of-00001.safetensors"),
    "pth": lambda tensors, path: torch.save(tensors, path / "model.pth"),
    "pth of DDP": lambda tensors, path: torch.save(
        {"state_dict": {f"module.{name}": one for name, one in tensors.items()}, "epoch": 3}, path / "model.pth"
    ),
}
NAMES = {"safetensors": "model.safetensors", "folder": "", "pth": "model.pth", "pth of DDP": "model.pth"}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kind", KINDS)
def test_what_fits_is_loaded(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    KINDS[kind](backbone() | {"other.weight": torch.ones(2)}, tmp_path)
    if kind.startswith("pth"):  # a large one would fill the disk with copies, one for each rank
        monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda: pytest.fail("it must be read where it is"))
    model = make_model(3, run_seed=1)
    head = model[2].weight.clone()
    start.begin_with(str(tmp_path / NAMES[kind]), model)
    check(model, backbone())
    assert torch.equal(model[2].weight, head), "random"
    printed = capsys.readouterr().out
    assert "init     7 of 9 tensors from" in printed
    assert ("the weights are 'state_dict'; not read: 'epoch'\n" in printed) == (kind == "pth of DDP")
    assert "random: 2.weight (3, 6) (there: (7, 6)), 2.bias (3,) (there: (7,)); not used: other.weight" in printed


Tensors = dict[str, torch.Tensor]


def renamed(tensors: Tensors, prefix: str) -> Tensors:
    return {prefix + name: one.clone() for name, one in tensors.items()}


def others(tensors: Tensors) -> Tensors:
    return {name: one + 1 for name, one in tensors.items()}


class Theirs:
    """Of a library that is not here."""


def of_training(tensors: Tensors) -> dict[str, Any]:
    """What a script saves beside the weights."""
    model = make_model(7)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return {"epoch": 3, "optimizer": optimizer.state_dict(), "ema_optimizer": {"state": others(tensors)}}


# What torch.save has written, the place in it, and what the start says of it or why it refuses it.
SAVED: dict[str, tuple[Any, str, str]] = {
    "plain": (lambda t: t, "", ""),
    "model": (lambda t: {"model": t, **of_training(t)}, "", "the weights are 'model'; not read: 'epoch', 'optimizer'"),
    "model_state_dict": (lambda t: {"model_state_dict": t, "optimizer_state_dict": {}}, "", "are 'model_state_dict'"),
    "net": (lambda t: {"net": t, "acc": 0.5}, "", "the weights are 'net'"),
    "params": (lambda t: {"params": t}, "", "the weights are 'params'"),
    "another name": (lambda t: {"generator": t}, "", "the weights are 'generator'"),
    "two levels": (lambda t: {"ckpt": {"model": t}}, "", "the weights are 'ckpt.model'"),
    "beside an average": (lambda t: {"state_dict": t, "ema": others(t)}, "", r"\(--init \S+:ema reads that\)"),
    "the average": (lambda t: {"state_dict": others(t), "ema": t}, ":ema", "the weights are 'ema'; not read: 'state_d"),
    "averages among the weights": (lambda t: {**t, "ema": others(t)}, "", r"not read: 'ema' \(--init \S+:ema reads"),
    "no such place": (lambda t: {"model": t, "ema": t}, ":net", "has no dict of tensors 'net', but 'model', 'ema'"),
    "Namespace": (lambda t: {"model": t, "args": argparse.Namespace(lr=1.0)}, "", "not read: 'args'"),
    "numbers of NumPy": (lambda t: {"model": t, "best": np.float64(3), "step": np.int64(2)}, "", "not read: 'best'"),
    "an array": (lambda t: {"model": t, "mean": np.ones(3)}, "", "not read: 'mean'"),
    "a path": (lambda t: {"model": t, "out": Path("runs")}, "", "not read: 'out'"),
    "DDP": (lambda t: renamed(t, "module."), "", ""),
    "compiled DDP": (lambda t: renamed(t, "_orig_mod.module."), "", ""),
    "Lightning": (lambda t: {"state_dict": renamed(t, "model.")}, "", "the tensors without the prefix 'model.'"),
    "a backbone": (
        lambda t: {**renamed(t, "net.backbone."), "loss.weight": torch.ones(2)},
        "",
        "prefix 'net.backbone.'",
    ),
    "their class": (
        lambda t: {"model": t, "config": Theirs()},
        "",
        r"an object of tests.state.test_start.Theirs beside",
    ),
    "a whole model": (lambda t: make_model(7), "", "an object of torch.nn.modules.container.Sequential beside the wei"),
    "no weights": (lambda t: {"epoch": 3, "name": "x"}, "", "holds no dict of tensors by name, but epoch, name"),
    "not finite": (lambda t: {**t, "0.weight": t["0.weight"] / 0}, "", "0.weight has NaN or infinite numbers"),
    "integers": (lambda t: {**t, "0.weight": t["0.weight"].char()}, "", "torch.int8 in 0.weight: it is of a quantised"),
}
IN_SAFETENSORS: dict[str, tuple[Any, str]] = {
    "plain": (lambda t: t, ""),
    "DDP": (lambda t: renamed(t, "module."), ""),
    "a backbone": (lambda t: renamed(t, "backbone."), "the tensors without the prefix 'backbone.'"),
    "float8": (lambda t: {**t, "0.weight": t["0.weight"].to(torch.float8_e4m3fn)}, "torch.float8_e4m3fn in 0.weight"),
    "scales": (lambda t: {**t, "0.qweight": torch.ones(2, dtype=torch.int32)}, "0.qweight, which scales others"),
    "not finite": (lambda t: {**t, "2.bias": t["2.bias"] * torch.nan}, "2.bias has NaN or infinite numbers"),
}
REFUSED = ("has no dict", "an object of", "holds no dict", "NaN or inf", "quantised", "float8", "scales others")


def begins(flag: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The model gets the weights, or a sentence says why not."""
    model = make_model(7, run_seed=1)
    if any(word in says for word in REFUSED):
        with pytest.raises(UserError, match=says):
            start.begin_with(flag, model)
        return
    start.begin_with(flag, model)
    for name, one in model.state_dict().items():
        assert torch.equal(one, backbone()[name]), name
    printed = capsys.readouterr().out
    assert re.search(says, printed), printed
    assert "init     9 of 9 tensors from" in printed


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("form", SAVED)
def test_what_torch_save_has_written(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, place, says = SAVED[form]
    torch.save(make(backbone()), tmp_path / "model.ckpt")
    begins(f"{tmp_path / 'model.ckpt'}{place}", says, capsys)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("form", IN_SAFETENSORS)
def test_what_safetensors_hold(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, says = IN_SAFETENSORS[form]
    save_file(make(backbone()), tmp_path / "model.safetensors")
    begins(str(tmp_path / "model.safetensors"), says, capsys)


@pytest.mark.usefixtures("group")
def test_model_around_what_the_file_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And what fits by chance, of two tensors of many, gets no prefix."""
    save_file(backbone(), tmp_path / "model.safetensors")
    model = nn.ModuleDict({"backbone": make_model(7, run_seed=1), "head": nn.Linear(7, 2)})
    start.begin_with(str(tmp_path / "model.safetensors"), model)
    assert torch.equal(model["backbone"][2].weight, backbone()["2.weight"])
    assert "with the prefix 'backbone.', which their names lack" in capsys.readouterr().out
    save_file({"a.0.weight": torch.ones(6, 5), **renamed(backbone(), "other.0.")}, tmp_path / "few.safetensors")
    with pytest.raises(UserError, match="no tensor has the name and shape"):
        start.begin_with(
            str(tmp_path / "few.safetensors"), nn.Sequential(nn.Linear(5, 6), *map(nn.Linear, [6] * 9, [6] * 9))
        )


@pytest.mark.usefixtures("group")
def test_what_no_file_of_weights_is(tmp_path: Path) -> None:
    """A pointer, a folder of torch.distributed.checkpoint, a folder whose config.json declares packed numbers."""
    for name in ("model.safetensors", "model.pth", "folder/model.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
        flag = tmp_path / name.replace("folder/model.safetensors", "folder")
        with pytest.raises(
            UserError, match=f"--init {flag}: .* is a pointer of Git LFS, not the weights: `git lfs pull`"
        ):
            start.begin_with(str(flag), make_model(7))
    (tmp_path / "dcp").mkdir()
    dcp.save(backbone(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(UserError, match=r"whose \.metadata is a pickle") as refusal:
        start.begin_with(str(tmp_path / "dcp"), make_model(7))
    (command,) = re.findall(r"python -m (\S+) dcp_to_torch", str(refusal.value))
    assert command == format_utils.__name__
    format_utils.dcp_to_torch_save(tmp_path / "dcp", tmp_path / "weights.pt")
    start.begin_with(str(tmp_path / "weights.pt"), model := make_model(7, run_seed=1))
    assert torch.equal(model[0].weight, backbone()["0.weight"])
    (tmp_path / "packed").mkdir()
    save_file(backbone(), tmp_path / "packed" / "model.safetensors")
    (tmp_path / "packed" / "config.json").write_text('{"quantization_config": {"quant_method": "gptq", "bits": 4}}')
    with pytest.raises(UserError, match=r"config\.json declares gptq: it is of a quantised model"):
        start.begin_with(str(tmp_path / "packed"), make_model(7))


def check(model: nn.Module, wanted: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in keymap.model_tensors(model).items():
        if not name.startswith("2."):
            whole = getattr(tensor, "full_tensor", lambda t=tensor: t)()
            assert torch.equal(whole, wanted[name]), name


def begin_with_on_ranks(*files: str) -> None:
    dist.init_process_group("gloo")
    for strategy, file in itertools.product(("DDP", "FSDP"), files):
        model: nn.Module = make_model(3, run_seed=1)
        if strategy == "DDP":
            model = DistributedDataParallel(model)
        else:
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        start.begin_with(file, model)
        check(model, backbone())
    dist.destroy_process_group()


def test_on_ranks(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(backbone(), file)
    torch.save(backbone(), tmp_path / "model.pth")
    result = runner.spawn(begin_with_on_ranks, [(str(file), str(tmp_path / "model.pth"))] * 2)
    assert result.ok, str(result)


class Fetched:
    """Weights of torchvision that take a while to come, and that two processes must not fetch at a time."""

    def __init__(self, place: Path) -> None:
        self.DEFAULT = self
        self.place = place

    def get_state_dict(self, check_hash: bool) -> dict[str, torch.Tensor]:
        assert check_hash
        with (self.place / "fetching").open("x"):
            time.sleep(0.2)
        (self.place / "fetching").unlink()
        return backbone()


def fetch_on_ranks(place: Path) -> None:
    dist.init_process_group("gloo")
    torch.hub.set_dir(str(place))
    torchvision.models.get_model_weights = lambda name: Fetched(place)
    model = make_model(3, run_seed=1)
    start.begin_with("torchvision:some", model)
    check(model, backbone())
    dist.destroy_process_group()


def test_one_rank_fetches_at_a_time(tmp_path: Path) -> None:
    result = runner.spawn(fetch_on_ranks, [(tmp_path,)] * 2)
    assert result.ok, str(result)


def test_waiting_for_weights_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: None) -> None:
    monkeypatch.setattr(pretrained, "WAIT_S", 0.1)
    monkeypatch.setattr(torchvision.models, "get_model_weights", lambda name: Fetched(tmp_path))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    with (
        filelock.FileLock(tmp_path / "checkpoints" / "some.lock", is_singleton=False),
        pytest.raises(UserError, match=r"--init torchvision:some cannot be read: .*some\.lock.* could not be acquired"),
    ):
        start.begin_with("torchvision:some", make_model(3))


@pytest.mark.usefixtures("group")
def test_refusals(tmp_path: Path) -> None:
    model = make_model(3)
    with pytest.raises(UserError, match=r"--init \S+none: there is no such folder or file; it may be"):
        start.begin_with(str(tmp_path / "none"), model)
    (tmp_path / "broken.pth").write_bytes(b"no pickle")
    with pytest.raises(UserError, match=r"broken\.pth cannot be read: "):
        start.begin_with(str(tmp_path / "broken.pth"), model)
    torch.save([1], tmp_path / "list.pth")
    with pytest.raises(UserError, match=r"holds a list, and not a state dict"):
        start.begin_with(str(tmp_path / "list.pth"), model)
    torch.save({"other": torch.ones(2)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match=r"no tensor has .* 0\.weight \(6, 5\); the file has \('other'"):
        start.begin_with(str(tmp_path / "other.pth"), model)
    with pytest.raises(UserError, match=r"torchvision:resnet19 cannot be read: "):
        start.begin_with("torchvision:resnet19", model)


class Trap:
    def __reduce__(self) -> tuple:
        return (print, ("the trap was run",))


@pytest.mark.usefixtures("group")
def test_pickle_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"0.weight": Trap()}, tmp_path / "trap.pth")
    with pytest.raises(UserError, match=r"trap\.pth holds an object of print beside the weights, and to read"):
        start.begin_with(str(tmp_path / "trap.pth"), make_model(3))
    assert "the trap was run" not in capsys.readouterr().out


def test_run_of_a_recipe(small_digits: Path, tmp_path: Path) -> None:
    """A new run begins with the weights of another; the same command then resumes its own, not these."""
    flags = [
        "--data",
        str(small_digits),
        "--out",
        str(tmp_path),
        *runner.SMALL["resnet"],
        "--lr",
        "0",
        "--momentum",
        "0",
    ]
    flags += ["--max-steps", "2", "--save-every", "2", "--eval-every", "2", "--dtype", "float32"]
    for name, more in (("first", []), ("second", ["--init", str(tmp_path / "first"), "--seed", "5"])):
        result = runner.run_recipe("ddp_resnet", 2, *flags, "--name", name, *more)
        assert result.ok, str(result)
    assert "tensors from" in str(result)
    result = runner.run_recipe(
        "ddp_resnet", 2, *flags, "--name", "second", "--init", "gone", "--max-steps", "4", "--seed", "5"
    )
    assert result.ok, str(result)
    assert "init     " not in str(result)


def test_import_of_a_checkpoint(tmp_path: Path, group: None) -> None:
    """Whose digests are verified, as for --resume."""
    path = save(tmp_path, 4)
    next(path.glob("*.safetensors")).write_bytes(b"")
    with pytest.raises(UserError, match=r"--init .*every checkpoint is damaged"):
        start.begin_with(str(path), make_model(3))


def test_frozen_weights_that_nothing_fills_are_named(
    tmp_path: Path, group: None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({"0.bias": torch.zeros(6), "1.weight": torch.ones(2, 6), "1.bias": torch.ones(2)}, file)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    begin = "warning: 0.weight: random and frozen: train it, as by --rates 0=1"
    for trained, warned in ((False, True), (True, False)):
        model[0].weight.requires_grad_(trained)
        start.begin_with(str(file), model)
        assert (begin in capsys.readouterr().out) == warned


@pytest.mark.usefixtures("group")
def test_numbers_of_an_optimizer_are_restored(tmp_path: Path) -> None:
    """Those that are no tensors, of parameters and of groups: a load fills copies of them."""
    models = [make_model(3, run_seed=0), make_model(3, run_seed=1)]
    optimizers = [own.OddOptimizer(model.parameters(), lr=0.1) for model in models]
    for _ in range(2):
        models[0](torch.ones(4, 5)).sum().backward()
        optimizers[0].step()
    make_saver(tmp_path).save(2, keymap.to_save(models[0], optimizers[0]), 20, last=True)
    start.restore(checkpoint.folder(tmp_path, 2), "", models[1], optimizers[1])
    assert [group["count"] for group in optimizers[1].param_groups] == [2]
    assert {state["step"] for state in optimizers[1].state.values()} == {2}


class Counts:
    """A strategy that keeps a counter beside the model, and halves of what the checkpoint has as wholes."""

    def __init__(self, size: int, value: int) -> None:
        self.counter = torch.full((size,), value)
        self.filled = False

    def to_checkpoint(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: 2 * one for name, one in tensors.items()} | {f"{keymap.STRATEGY}counter": self.counter}

    def from_checkpoint(self, tensors: dict[str, torch.Tensor]) -> None:
        assert tensors.keys() == {f"{keymap.STRATEGY}counter"}
        self.filled = True


def counting_model(size: int, value: int) -> tuple[Any, torch.optim.Optimizer]:
    model: Any = make_model(3, run_seed=value)
    model.strategy = Counts(size, value)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    keymap.create_state(optimizer)
    return model, optimizer


@pytest.mark.usefixtures("group")
def test_strategy_fills_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the checkpoint has it, of the same shape; else a line says so, and the plain names are loaded."""
    model, optimizer = counting_model(2, 5)
    path = checkpoint.folder(tmp_path, 1)
    make_saver(tmp_path).save(1, keymap.to_save(model, optimizer), 10, last=True)
    for size in (2, 3):
        other, its_optimizer = counting_model(size, 7)
        start.restore(path, "", other, its_optimizer)
        assert torch.equal(other[0].weight, 2 * model[0].weight)
        assert other.strategy.filled == (size == 2)
        assert other.strategy.counter.tolist() == ([5, 5] if size == 2 else [7, 7, 7])
        assert ("has no strategy.counter of shape (3,)" in capsys.readouterr().out) == (size == 3)
    plain = make_model(3)
    start.restore(path, "", plain, torch.optim.AdamW(plain.parameters(), fused=True))
    assert torch.equal(plain[0].weight, 2 * model[0].weight)
