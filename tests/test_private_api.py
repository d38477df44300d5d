"""Each private part of torch and Accelerate is there and does what it is called for; each loss is explained.

A failure here names the part that a new release has changed.
"""

import contextlib
import os
import re
import runpy
import sys
import tomllib
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import launch.private_api
import pytest
import torch
import torch.distributed as dist
from common import private_api
from common.protect import diagnose
from common.run import process_group
from common.workloads import private_api as of_workloads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import _backward, schedules
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.debug import CommDebugMode

from launch import strategy
from tests.harness import runner

CPU = torch.device("cpu")


def test_checked_versions_are_those_that_run() -> None:
    """The oldest and the newest that pyproject.toml names: whoever changes one of them has to look at this file."""
    project = tomllib.loads((runner.ROOT / "pyproject.toml").read_text())
    bounds = [*project["project"]["dependencies"], *project["tool"]["uv"]["constraint-dependencies"]]
    checked = f"{private_api.__doc__} {of_workloads.__doc__} {launch.private_api.CHECKED}"
    for package in ("torch", "datasets", "accelerate"):
        versions = [bound[1] for line in bounds if (bound := re.fullmatch(rf"{package}[>=]=([\d.]+)", line))]
        assert len(versions) == 2, "a floor, and the one tested"
        for version in versions:
            assert re.search(rf"\b{re.escape(version)}\b", checked), f"{package} {version} is not among: {checked}"


# --- the flight recorder ---


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_flight_recorder(device: str) -> None:
    """With what `diagnose.waits_in` reads of an entry. Where torch looks for NCCL's records, it finds gloo's too."""
    dist.all_reduce(torch.ones(3, 5))
    entries = private_api.flight_recorder(torch.device(device), only_active=False)["entries"]
    newest = entries[-1]
    assert newest["profiling_name"] == "gloo:all_reduce"
    assert newest["input_sizes"] == [[3, 5]]
    assert newest["process_group"][1] == "default_pg"
    assert newest["collective_seq_id"] > 0
    assert diagnose.waits_in({"entries": [newest | {"retired": True}]}, "", "") == ""
    assert "all_reduce" in diagnose.waits_in({"entries": [newest | {"retired": False}]}, "", "")


def test_torch_without_a_flight_recorder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.delattr(torch._C._distributed_c10d, "_dump_fr_trace_json")
    for _ in range(2):
        assert private_api.flight_recorder(CPU, only_active=True) == {}
    warned = capsys.readouterr().out
    assert warned.count("warning:") == 1
    assert f"torch {torch.__version__} has no _dump_fr_trace_json" in warned


def test_copy_of_many_tensors() -> None:
    values = [torch.arange(3.0), torch.tensor(2.0), torch.ones(2, 2, 2, 3).to(memory_format=torch.channels_last)]
    to = [torch.zeros_like(one) for one in values[:2]] + [torch.zeros(2, 2, 2, 3)]
    private_api.copy_each(to, values)
    assert all(map(torch.equal, to, values))


# --- how torchrun starts ranks ---


def test_start_of_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torchrun asks for each process, with its whole environment, and starts those that it does not get."""
    handlers = torch.distributed.elastic.multiprocessing.subprocess_handler
    monkeypatch.setattr(handlers.SubprocessHandler, "_popen", handlers.SubprocessHandler._popen)  # and put it back
    asked: list[Any] = []
    given = object()

    def start(args: tuple[str, ...], env: dict[str, str], out: int, err: int) -> Any:
        asked.append((args, env["RANK"], env["PATH"], out, os.readlink(f"/proc/self/fd/{err}")))
        return given if env["RANK"] == "0" else None

    launch.private_api.start_ranks_by(start)
    log = str(tmp_path / "err")
    started = [
        handlers.get_subprocess_handler(sys.executable, ("-c", "exit(7)"), {"RANK": str(rank)}, None, log, rank)
        for rank in range(2)
    ]
    assert started[0].proc is given
    assert started[1].proc.wait(30) == 7
    for handler in started:
        handler._stderr.close()
    assert asked == [((sys.executable, "-c", "exit(7)"), str(rank), os.environ["PATH"], 1, log) for rank in range(2)]


def test_torch_that_starts_ranks_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = torch.distributed.elastic.multiprocessing.subprocess_handler
    monkeypatch.delattr(handlers.SubprocessHandler, "_popen")
    launch.private_api.start_ranks_by(lambda *_: 1 / 0)
    assert not hasattr(handlers.SubprocessHandler, "_popen")


@pytest.mark.parametrize(("level", "said"), [("ERROR", False), ("INFO", True)])
def test_level_of_the_log(level: str, said: bool, capfd: pytest.CaptureFixture) -> None:
    assert launch.private_api.can_set_log_level()
    launch.private_api.set_log_level(level)
    launch.private_api.set_log_level("no level")
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launch.private_api.set_log_level(os.environ.get("TORCH_CPP_LOG_LEVEL", "WARNING"))
    assert ("TCPStore" in capfd.readouterr().err) is said


# --- functions on a stack ---


class Probe:
    """Keeps the files and functions that it is called from."""

    def __init__(self) -> None:
        self.frames: list[traceback.FrameSummary] = []

    def __call__(self, *_: object) -> None:
        self.frames = list(traceback.StackSummary.extract(traceback.walk_stack(sys._getframe())))

    def __reduce__(self) -> Any:
        """Being pickled is being called."""
        self()
        return str, ()


class Module(nn.Module):
    def forward(self, probe: Probe) -> None:
        probe()


def hooked(probe: Probe) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf and a sum whose backward pass calls the probe."""
    leaf = torch.ones(1, requires_grad=True)
    doubled = 2 * leaf
    doubled.register_hook(probe)
    return leaf, doubled.sum()


def differentiate(probe: Probe) -> None:
    leaf, total = hooked(probe)
    torch.autograd.grad(total, leaf)


WAYS: dict[str, Callable[[Probe], Any]] = {
    "torch/distributed/distributed_c10d.py": lambda probe: dist.all_gather_object([None], probe),
    "torch/optim/": lambda probe: torch.optim.SGD([torch.ones(1)], lr=0.1).step(lambda: probe() or 0.0),
    "torch/_tensor.py": lambda probe: hooked(probe)[1].backward(),
    "torch/autograd/__init__.py": differentiate,
    "torch/distributed/pipelining/_backward.py": lambda probe: _backward.stage_backward(hooked(probe)[1], None, []),
    "torch/nn/modules/module.py": Module(),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("phase", "file", "function"), private_api.FRAMES)
def test_frames_of_a_phase(phase: str, file: str, function: str) -> None:
    probe = Probe()
    WAYS[file](probe)
    found = [frame.name for frame in probe.frames if file in frame.filename]
    assert function in found if function else found, f"{phase}: {function or 'nothing'} of {file} is on the stack"


def test_functions_that_wait_for_a_message() -> None:
    functions = {one.__name__ for one in (schedules._wait_batch_p2p, dist.recv, dist.send)}
    assert functions == set(private_api.MESSAGES)


def wait_for_one_second() -> None:
    store, rank, size = next(dist.rendezvous("env://"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    process_group.set_timeout(mesh, 900.0)
    for group in (dist.group.WORLD, *mesh.get_all_groups()):
        found: Any = group._get_backend(CPU)
        assert found.options._timeout == timedelta(seconds=1860), "longer than a rank that moves may take"
    private_api.set_timeout(timedelta(seconds=1), mesh.get_group("tp"))
    if rank % 2:  # comes too late, whatever the time: once the others have given up
        store.wait(["given up/0", "given up/2"], timedelta(seconds=runner.HANG_S))
        store.set(f"came/{rank}", "")
    else:
        with pytest.raises(RuntimeError, match=r"(?i)timed out waiting 1000ms"):
            dist.all_reduce(torch.ones(1), group=mesh.get_group("tp"))
        store.set(f"given up/{rank}", "")
        if not rank:  # holds the store: whoever else still waited for an answer of it would lose the connection
            store.wait(["came/1", "came/3"], timedelta(seconds=runner.HANG_S))


def test_timeout_of_the_groups_of_a_mesh() -> None:
    result = runner.spawn(wait_for_one_second, [()] * 4)
    assert result.ok, str(result)


def test_backend_of_nccl_is_one_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 builds "nccl2" where "nccl" is asked for. A mock: no NCCL is here."""
    asked: list[tuple[Any, ...]] = []

    def dump(*args: Any) -> str:
        asked.append(args[2:])
        return '{"entries": []}'

    c10d = torch._C._distributed_c10d
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", dump)
    private_api.flight_recorder(torch.device("cuda", 0), only_active=True)
    names = {"gloo", *(name for args in asked for name in args)}
    assert {"gloo", "nccl"} <= names
    if hasattr(c10d, "ProcessGroupNCCL2"):
        assert "nccl2" in names


# --- tensors ---


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_update_is_skipped(name: str) -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = OPTIMIZERS[name]([weight])
    seen = []
    for bad in (False, True, False):
        weight.grad = torch.full((4,), float("nan") if bad else 1.0)
        private_api.skip_update_if(optimizer, torch.tensor(bad))
        optimizer.step()
        seen.append(torch.cat([weight.detach(), *(part.flatten() for part in optimizer.state[weight].values())]))
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert seen[2].isfinite().all()


def test_backward_pass_of_a_compiled_graph_runs_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._functorch.config as functorch

    def once_and_twice() -> None:
        """Whole, as the last micro-batches of a zero-bubble schedule, and in two parts, as its first ones."""
        torch._dynamo.reset()
        leaf = torch.ones(3, requires_grad=True)
        compiled = torch.compile(lambda x: x.sin().cos().exp().sum(), backend="aot_eager")
        whole = torch.autograd.grad(compiled(leaf), leaf)[0]
        total = compiled(leaf)
        for _ in range(2):
            assert torch.equal(torch.autograd.grad(total, leaf, retain_graph=True)[0], whole)

    monkeypatch.setattr(functorch, "donated_buffer", True)
    with pytest.raises(RuntimeError, match="donated buffers"):
        once_and_twice()
    private_api.keep_compiled_activations()
    once_and_twice()


def reduce_over_a_mesh() -> None:
    dist.init_process_group("gloo")
    for merged, wanted in ((False, 2), (True, 1)):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        if merged:
            private_api.merge_axes(mesh)
        partial = DTensor.from_local(torch.ones(()), mesh, [Partial(), Partial()])
        with CommDebugMode() as calls:
            assert partial.full_tensor() == 4
        assert calls.get_total_counts() == wanted, calls.get_comm_counts()
    private_api.merge_axes(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
    dist.destroy_process_group()


def test_axes_of_a_mesh_are_reduced_over_at_once() -> None:
    result = runner.spawn(reduce_over_a_mesh, [()] * 4)
    assert result.ok, str(result)


# --- objects ---


class Runs:
    """Being loaded is making a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def send_objects(folder: str) -> None:
    """Rank 1 is a stranger at first: its pickles carry no seal, then that of another key."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for attempt in ("open", "without a seal", "another key", "the same key"):
        key = bytes([rank] * 32) if attempt == "another key" else b"0" * 32
        if attempt == "open" or (attempt == "without a seal" and rank == 1):
            key = b""
        marker = str(Path(folder) / attempt)
        refused = attempt in ("without a seal", "another key") and rank == 0
        with (
            private_api.sealed_objects(key) if key else contextlib.nullcontext(),
            pytest.raises(RuntimeError, match="no rank of this run has sent") if refused else contextlib.nullcontext(),
        ):
            dist.gather_object(Runs(marker) if rank else None, [None] * 2 if not rank else None)
        dist.barrier()
    with private_api.sealed_objects(b"0" * 32):
        found: list[Any] = [None, None]
        dist.all_gather_object(found, {"rank": rank, "more": "x" * 1000 * rank})
        assert [one["rank"] for one in found] == [0, 1]
        found = [{"from": 0}] if rank == 0 else [None]
        dist.broadcast_object_list(found)
        assert found == [{"from": 0}]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [1, "two"] if rank == 0 else None)
        assert mine == [[1, "two"][rank]]
    dist.destroy_process_group()


def test_objects_of_a_stranger_are_not_loaded(tmp_path: Path) -> None:
    result = runner.spawn(send_objects, [(str(tmp_path),)] * 2)
    assert result.ok, str(result)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["open", "the same key"], "the first is the mutant"


def test_torch_without_its_pickler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.delattr(dist.distributed_c10d, "_unpickler")
    with private_api.sealed_objects(b""):
        assert "has no _unpickler to replace" in capsys.readouterr().out


def test_layouts_can_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor import debug

    called: list[int] = []
    assert callable(debug._clear_sharding_prop_cache)
    monkeypatch.setattr(debug, "_clear_sharding_prop_cache", lambda: called.append(1))
    private_api.forget_meshes()
    assert called == [1]


# --- files ---


# --- the launcher ---


def test_accelerate_without_its_reader_of_config_files(monkeypatch: pytest.MonkeyPatch) -> None:
    config = str(runner.ROOT / "recipes/accelerate_gpt/configs/ddp.yaml")
    assert strategy.environment(config)
    monkeypatch.delattr("accelerate.commands.launch._validate_launch_command")
    with pytest.raises(
        ValueError, match=r"^accelerate [\d.]+ has no _validate_launch_command, which ACCELERATE_CONFIG"
    ):
        strategy.environment(config)


# --- older torch ---


def with_an_older_torch(path: str, argv: list[str]) -> None:
    torch.__version__ = torch.torch_version.TorchVersion("2.14.1+cpu")
    sys.argv = [path, *argv]
    runpy.run_path(path, run_name="__main__")


def test_schedules_that_an_older_torch_cannot_run(tmp_path: Path) -> None:
    path = str(runner.ROOT / "recipes/pipeline_gpt/train.py")
    flags = ["--out", str(tmp_path / "out"), "--schedule", "ZBVZeroBubble"]
    result = runner.spawn(with_an_older_torch, [(path, flags)] * 2)
    assert result.codes[0] == 2, str(result)
    assert "--schedule ZBVZeroBubble needs torch 2.15, and this is 2.14.1+cpu" in result.outputs[0]
