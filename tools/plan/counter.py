"""Counts what a rank does in a training step of a recipe: in a process of its own, as it changes torch.

`count` starts it as `python -m tools.plan.counter`, gives it `[{"folder": "recipes/ddp_gpt", "size": 8, "flags": []}]`
on standard input, and reads a line of JSON for each case.
"""

import collections
import contextlib
import copy
import dataclasses
import gc
import io
import json
import os
import re
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from common import UserError, keymap
from common.run import cli
from common.run.process import World
from common.state import average, replicas, state_check
from common.train import data, flops, guard, initial, sampler
from common.train.data import map_tensors
from common.workloads import moe
from launch import strategy
from tools import about
from tools.plan import fake_device, orders, repeat
from tools.plan.transformer import DIAGONAL
from tools.plan.work import HIDDEN, KINDS, Traffic

ROOT = Path(__file__).resolve().parents[2]
WARM_STEPS = 1  # creates what lasts: the optimizer's state, FSDP's order of blocks
SPECIAL = ("convolution", "attention")  # in an operator's name: what is no plain product, and has a reach of its own
SMALL_BYTES = 1000
LEAST_SAMPLES = 2**20  # of a data set: as many as any step reads
FSDP_CODE = "_fsdp_collectives.py"  # of torch: what it sends on GPUs travels beside the computation

GROUPED = "aten::_grouped_mm"  # of a mixture of experts; torch's own table of FLOPs has no formula for it
COLLECTIVES = {  # operator: its name here, and which of its arguments holds what is counted
    "c10d::allreduce_": ("all-reduce", 0),
    "c10d::allreduce_coalesced_": ("all-reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::_allgather_base_": ("all-gather", 0),  # what all ranks have together
    "c10d::allgather_": ("all-gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all-gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
    "c10d::reduce_scatter_": ("reduce-scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "c10d::alltoall_base_": ("all-to-all", 0),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("receive", 0),
    "_c10d_functional::all_reduce": ("all-reduce", 0),
    "_c10d_functional::all_reduce_": ("all-reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all-gather", -1),  # -1: its result
    "_c10d_functional::reduce_scatter_tensor": ("reduce-scatter", 0),
    "_c10d_functional::all_to_all_single": ("all-to-all", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
}
QUIET = {  # they launch nothing
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::_unsafe_view",
    "aten::_reshape_alias",
    "aten::set_",
    "aten::resize_",
    "aten::lift_fresh",
    "aten::is_same_size",
    "aten::record_stream",
    "_c10d_functional::wait_tensor",
    "c10d::monitored_barrier_",
}


class Counter(TorchDispatchMode):
    """Counts the operators of one device's fake tensors, between `begin` and the end; and live bytes, always."""

    def __init__(self, device: torch.device, axes: dict[str, str], local_size: int) -> None:
        super().__init__()
        self.device = device
        self.axes = axes  # by group name
        self.local_size = local_size
        self.live: dict[int, int] = {}
        self.live_bytes = 0
        self.peak_at = 0  # how many storages had come when the peak was reached
        self.look_at = 0  # when to call `look`
        self.look: Callable[[], None] | None = None
        self.aside = False  # whether what runs computes shapes alone
        self.begin()

    def begin(self) -> None:
        """Forget what was counted."""
        self.syncs: collections.Counter[str] = collections.Counter()
        self.cpu_tensors: collections.Counter[str] = collections.Counter()
        self.to_host = self.from_host = 0
        self.casts: collections.Counter[str] = collections.Counter()
        self.cast_elements: collections.Counter[str] = collections.Counter()
        self.kernels: collections.Counter[str] = collections.Counter()
        # (FLOPs, bytes, type, kind) of each
        self.products: collections.Counter[tuple[int, int, str, str]] = collections.Counter()
        self.elementwise_bytes = self.exponentials = 0
        self.sent: dict[tuple[str, str, str], Traffic] = {}
        self.small_calls: collections.Counter[tuple[str, str]] = collections.Counter()
        self.came = self.peak_at = 0
        self.peak_bytes = self.live_bytes

    def report(self) -> dict[str, Any]:
        """What was counted, as JSON values."""
        return {
            "syncs": dict(self.syncs),
            "to_host": self.to_host,
            "from_host": self.from_host,
            "cpu_tensors": dict(self.cpu_tensors),
            "casts": dict(self.casts),
            "cast_elements": dict(self.cast_elements),
            "kernels": self.kernels.total(),
            "products": sorted([*key, count] for key, count in self.products.items()),
            "elementwise_bytes": self.elementwise_bytes,
            "exponentials": self.exponentials,
            "traffic": [dataclasses.asdict(one) for _, one in sorted(self.sent.items())],
            "small_calls": {" ".join(key): count for key, count in sorted(self.small_calls.items())},
            "held_bytes": self.live_bytes,
            "peak_bytes": self.peak_bytes,
        }

    def sync(self, what: str) -> None:
        """The host waits for the device."""
        self.syncs[f"{what} at {_place()}"] += 1

    def _here(self, tensor: torch.Tensor) -> bool:
        # On a CPU, the host's own small tensors are none of the model's.
        return isinstance(tensor, FakeTensor) and tensor.fake_device.type == self.device.type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # they call the operators of their parts, which are counted
        kwargs = kwargs or {}
        if self.aside:
            return func(*args, **kwargs)
        name = func._schema.name
        tensors = _tensors([*args, *kwargs.values()])
        here = any(map(self._here, tensors))
        if name in ("aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero") and here:
            self.sync(name)
            return 1  # a fake tensor has no value
        if name in ("aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2") and here:
            self.sync(name)
        # No fused SGD for fake tensors: it changes its arguments, and returns nothing.
        out = None if name == "aten::_fused_sgd_" else func(*args, **kwargs)
        results = _tensors([out])
        for tensor in (*results, *tensors):
            self._hold(tensor)
        if name in COLLECTIVES:
            self._count_collective(name, func, args, kwargs, results)
        elif here or any(map(self._here, results)):
            self._count_kernel(name, func, args, kwargs, tensors, results, out)
        return out

    def _count_collective(self, name: str, func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> None:
        kind, index = COLLECTIVES[name]
        given = [arg.name for arg in func._schema.arguments]
        named = dict(zip(given, args, strict=False)) | kwargs
        group = named.get("group_name")
        if group is None:
            group = dist.ProcessGroup.unbox(named["process_group"]).group_name
        elif not isinstance(group, str):
            group = group.group_name
        counted = results if index < 0 else _tensors([args[index]])
        sent = sum(map(_bytes, counted))
        made = distributed_c10d._resolve_process_group(group)
        if group not in self.axes:  # a library has made it
            self.axes[group] = f"of {dist.get_world_size(made)}"
        axis, hidden = self.axes[group], self._hidden(name, named)
        found = self.sent.get((kind, axis, hidden))
        if not found:
            members = dist.get_process_group_ranks(made)
            machines = len({rank // self.local_size for rank in members})
            found = Traffic(kind, axis, len(members), machines, 0, 0, hidden)
        if sent < SMALL_BYTES:
            self.small_calls[kind, axis] += 1
        self.sent[kind, axis, hidden] = dataclasses.replace(found, calls=found.calls + 1, bytes=found.bytes + sent)

    def _hidden(self, name: str, named: dict[str, Any]) -> str:
        """Behind what a collective hides: see `work.HIDDEN`."""
        if name.startswith("c10d::") and name not in ("c10d::send", "c10d::recv_"):
            if self.device.type == "cuda" and _called_from(FSDP_CODE):
                return HIDDEN[2]
            if named.get("async_op", True) and not _called_from("_functional_collectives.py"):
                return HIDDEN[1]
        return HIDDEN[0]

    def _count_kernel(
        self, name: str, func: Any, args: Any, kwargs: Any, tensors: list[Any], results: list[Any], out: Any
    ) -> None:
        if func.is_view or name in QUIET or name.startswith("prim"):
            return
        if name == "aten::_to_copy":
            self._count_copy(tensors[0], results[0], kwargs.get("non_blocking", False))
        elif name == "aten::copy_":
            self._count_copy(tensors[1], tensors[0], any(args[2:]))
        elif name == "aten::_foreach_copy_":
            for source, target in zip(args[1], args[0], strict=True):
                self._count_copy(source, target, any(args[2:]))
        elif self.device.type == "cuda" and any(tensor.device.type == "cpu" and tensor.ndim for tensor in tensors):
            self.cpu_tensors[f"{name} at {_place()}"] += 1
        self.kernels[name] += 1
        moved = sum(_bytes(tensor) for tensor in (*tensors, *results) if self._here(tensor))
        if func._overloadpacket in flop_registry or name == GROUPED:
            if name == GROUPED:
                count = 2 * tensors[0].numel() * results[0].shape[-1]
            else:
                count = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
            kind = next((one for one in SPECIAL if one in name), "product")
            if kind == "attention":
                length, width = tensors[0].shape[-2:]
                if any(one is True for one in args):  # causal: half of the square is left out, except its diagonal
                    whole = min(length, DIAGONAL) if self.device.type == "cuda" else 0
                    count = count * (length + whole) // (2 * length)
                self.exponentials += count // ((10 if "backward" in name else 4) * width)
            self.products[count, moved, _short(tensors[0].dtype), kind] += 1
        else:
            self.elementwise_bytes += moved

    def _count_copy(self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
        if source.is_cuda and not target.is_cuda:
            self.to_host += 1
            if not non_blocking:
                self.sync("copy to the host")
        elif target.is_cuda and not source.is_cuda:
            self.from_host += 1
        elif source.dtype != target.dtype:
            key = f"{_short(source.dtype)} to {_short(target.dtype)}"
            self.casts[key] += 1
            self.cast_elements[key] += source.numel()

    # --- live bytes ---

    def _hold(self, tensor: torch.Tensor) -> None:
        if not self._here(tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.live:
            weakref.finalize(storage, self._free, key)
            self.live[key] = 0
        self.resize(key, storage.nbytes())

    def resize(self, key: int, size: int) -> None:
        """A storage has this many bytes now."""
        grown = size - self.live[key]
        if not grown:
            return
        self.live_bytes += grown
        self.live[key] = size
        self.came += grown > 0
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_at = self.live_bytes, self.came
        if self.look and grown > 0 and self.came == self.look_at:
            self.look()

    def _free(self, key: int) -> None:
        self.live_bytes -= self.live.pop(key, 0)


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors of an operator's arguments or results, which are values and lists of them."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _called_from(file: str) -> bool:
    """Whether a function of this file of torch is running."""
    frame: Any = sys._getframe(1)
    while frame:
        if frame.f_code.co_filename.endswith(file):
            return True
        frame = frame.f_back
    return False


def _place() -> str:
    """The file and line of ours that is nearest to what runs."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and path.parts[len(ROOT.parts)] in ("recipes", "common"):
            return f"{path.relative_to(ROOT)}:{frame.lineno}"
    return "torch"


@contextlib.contextmanager
def resizing(counter: Counter) -> Iterator[None]:
    """Count storages that FSDP frees and fills again."""
    before = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        done = before(storage, size)
        if storage._cdata in counter.live:
            counter.resize(storage._cdata, size)
        return done

    with mock.patch.object(torch.UntypedStorage, "resize_", resize):
        yield


@contextlib.contextmanager
def shapes_aside(counter: Counter) -> Iterator[None]:
    """Leave out what DTensor runs on whole tensors without data, beside a rank's own parts, to know their shapes."""
    before = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate(propagator: Any, operator: Any) -> Any:
        counter.aside = True
        try:
            return before(propagator, operator)
        finally:
            counter.aside = False

    with mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate):
        yield


# --- a run ---------------------------------------------------------------------------------------------------------


class Shapes:
    """A data set of which only the shapes are known; what else it says, such as its classes, is its own word."""

    def __init__(self, one: Any, like: Any) -> None:
        self._one = one  # a batch of one sample
        self._like = like

    def __getattr__(self, name: str) -> Any:
        return getattr(self._like, name)

    def __len__(self) -> int:
        return LEAST_SAMPLES

    def read(self, epochs: np.ndarray, indices: np.ndarray) -> Any:
        """A batch of this many samples, without data."""
        return map_tensors(lambda one: torch.empty(len(indices), *one.shape[1:], dtype=one.dtype), self._one)


@dataclasses.dataclass
class StandIn:
    """What a text or a set of images says of itself, where there is none."""

    vocab_size: int = 256
    channels: int = 3
    size: int = 32
    sample_units: dict[str, int] = dataclasses.field(default_factory=dict)
    class_names: list[str] = dataclasses.field(default_factory=lambda: [str(i) for i in range(1000)])


def stand_in(args: Any) -> Shapes:
    """What a recipe's flags ask for: sequences, or images of 3 channels."""
    if hasattr(args, "seq_len"):
        pair = tuple(torch.empty(1, args.seq_len, dtype=torch.long) for _ in range(2))
        return Shapes(pair, StandIn(args.vocab_size or 256, sample_units={"tokens": args.seq_len}))
    side = args.image_size or 32
    pair = (torch.empty(1, 3, side, side, dtype=torch.uint8), torch.empty(1, dtype=torch.long))
    return Shapes(pair, StandIn(size=side))


def static_stages(recipe: Any, args: Any, whole: Any, division: sampler.Division) -> Any:
    """PipelineStage with the shapes that ranks otherwise tell each other at the start, which a fake group cannot."""
    from torch.distributed.pipelining import PipelineStage

    def make(stage: Any, index: int, num_stages: int, device: torch.device, group: Any) -> Any:
        size = (division.micro_batch_size, args.seq_len)
        first = copy.deepcopy(whole).to_empty(device=device)  # its first block gives the shape that stages send
        for name in list(first.blocks)[1:]:
            del first.blocks[name]
        first.norm = first.head = None
        dtype = recipe["precision"].compute_dtype(args.dtype, device)
        first.to(recipe["precision"].param_dtype(dtype))
        with torch.no_grad():
            tokens = torch.empty(size, dtype=torch.long, device=device)
            sent = recipe["precision"].autocast(device, dtype)(first.forward)(tokens).to(dtype)
        given = tokens if index == 0 else torch.empty_like(sent, requires_grad=True)
        is_last = index == num_stages - 1
        with torch.enable_grad():
            out = stage(given) if is_last else torch.empty_like(sent, requires_grad=True)
        return PipelineStage(stage, index, num_stages, device, group=group, input_args=given, output_args=out)

    return make


def axis_names(mesh: DeviceMesh) -> dict[str, str]:
    """The axis of each group of a mesh, by the group's name; of axes that DTensor has merged, their names together."""
    found: dict[str, str] = {mesh.get_group(axis).group_name: axis for axis in mesh.mesh_dim_names or ()}
    merged: dict[str, DeviceMesh] = getattr(mesh, "_flatten_mapping", {})
    return found | {axes.get_group().group_name: axis for axis, axes in merged.items()}


Change = Callable[[Any, Any], None]


def measure(
    folder: str,
    size: int,
    flags: list[str],
    rank: int = 0,
    *,
    config: str = "",
    device: str = "cuda",
    local_size: int = 8,
    gpu: str = "NVIDIA H100 80GB HBM3",
    memory_bytes: int = 80 * 2**30,
    bf16: bool = True,
    own_data: bool = False,
    only_step: bool = False,
    few: int | None = None,
    change: Change | None = None,
) -> dict[str, Any]:
    """Count what a rank does in the second training step, in an evaluation and in a comparison of the replicas.

    Args:
        folder: that holds the recipe's train.py.
        size: number of ranks.
        flags: of the recipe.
        rank: whose part.
        config: path of a config file of Accelerate, or "".
        device: type of what computes, cuda or cpu.
        local_size: ranks on a machine.
        gpu: name of each GPU.
        memory_bytes: of a GPU.
        bf16: whether a GPU computes in bfloat16.
        own_data: read the shapes from the recipe's own `make_data`, if its data are here; otherwise, sequences of bytes
            or images of 1000 classes stand for them.
        only_step: leave out evaluation and comparison, and add what the memory holds at the step's peak.
        few: 0 or 1 for the smaller or the larger of the two numbers of micro-batches from which `repeat` knows all, if
            there are more.
        change: what to do to the recipe's functions and model before the first step: a test's mistake.

    Raises:
        UserError: the recipe refuses the flags.
    """
    path = Path(folder) / "train.py"
    accelerate = strategy.environment(config) if config else {}
    if device == "cpu":  # Accelerate would call it cpu:0, which fake tensors take for another one
        accelerate |= {"ACCELERATE_TORCH_DEVICE": device}
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    with mock.patch.dict(os.environ, accelerate):
        functions = vars(about.load(path))
        args = cli.parse(functions["Args"], flags)
        train = shapes_of_data(functions["make_data"], args) if own_data and is_here(args) else stand_in(args)
        plain = functions["make_model"](args, train)
        counted = flops.count_sample(
            lambda model, batch: functions["forward"](args, model, batch)["loss"], plain, train
        )
        believe = fake_device.ranks_without_devices(place, size, rank, local_size, gpu, memory_bytes, bf16)
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        nobody: Any = None  # no store, as nobody asks it
        world = World(rank, size, min(size, local_size), "host", place, backend, nobody)
        with (
            believe,
            # No values are needed, and to divide them over 65,536 ranks takes minutes.
            mock.patch.object(initial, "_draw", lambda model, name, parameter, seed: parameter),
            mock.patch.object(replicas, "xxh3", lambda elements: elements.view(torch.uint8).sum()),  # reads it as well
            torch.autograd.set_multithreading_enabled(False),  # the device's thread would have to be started by CUDA
        ):
            if "DistributedDataParallel" in functions:
                functions["DistributedDataParallel"] = fake_device.Replicas
            mesh = functions["make_mesh"](args, world)
            counter = Counter(place, axis_names(mesh), local_size)
            fake_device.waits[:] = [counter.sync]
            with FakeTensorMode(allow_non_fake_inputs=True), resizing(counter), shapes_aside(counter), counter:
                found = _steps(functions, args, mesh, counter, train, only_step=only_step, few=few, change=change)
    tf32 = getattr(args, "matmul_precision", "highest") != "highest"
    return found | {"sample_flops": counted.flops, "units": dict(counted.units), "tf32": tf32}


def is_here(args: Any) -> bool:
    """Whether a recipe's data can be read now: they are built in, or a folder; a hub's are not fetched for a plan."""
    built_in = next((field.default for field in dataclasses.fields(args) if field.name == "data"), None)
    given = getattr(args, "data", None)
    return given is None or given == built_in or Path(str(given)).exists()


def shapes_of_data(make_data: Callable[[Any], Any], args: Any) -> Shapes:
    """Of a recipe's own data; where the built-in text is shorter than --seq-len, it was not meant: of what was."""
    try:
        return shapes_of(make_data(args)[0])
    except UserError as error:
        default = next((field.default for field in dataclasses.fields(args) if field.name == "data"), None)
        if "--seq-len" not in str(error) or args.data != default:
            raise
        return stand_in(args)


def shapes_of(train: Any) -> Shapes:
    """The first sample of a data set, for its shapes."""
    return Shapes(train.read(np.zeros(1, np.int64), np.zeros(1, np.int64)), train)


def fewer(division: sampler.Division, numbers: tuple[int, int], which: int) -> sampler.Division:
    """A step of one of two numbers of micro-batches, if there are more, and all of one size."""
    size = division.global_micro_batch_size
    if division.num_micro_batches <= max(numbers) or division.global_batch_size % size:
        return division
    return dataclasses.replace(division, global_batch_size=numbers[which] * size)


def _steps(
    recipe: Any,
    args: Any,
    mesh: Any,
    counter: Counter,
    train: Shapes,
    *,
    only_step: bool,
    few: int | None,
    change: Change | None,
) -> dict[str, Any]:
    """As `main` of the recipes, without what surrounds a step."""
    dp_rank, dp_size = recipe["dp_coordinates"](mesh)
    division = sampler.divide_batch(args.global_batch_size, args.micro_batch_size, dp_size)
    samples, micro_batches = division.global_batch_size, division.num_micro_batches
    if few is not None:
        stages = mesh["pp"].size() if "pp" in (mesh.mesh_dim_names or ()) else 1
        division = fewer(division, repeat.few(stages), few)
        args = dataclasses.replace(args, global_batch_size=division.global_batch_size)
    there = max(LEAST_SAMPLES, 4 * args.global_batch_size)
    plan = sampler.make_plan(division, there, run_seed=0, epochs=0, max_steps=WARM_STEPS + 5, progress={})
    model = recipe["make_model"](args, train)
    whole = sum(one.numel() * one.element_size() for one in keymap.model_tensors(model).values())
    total, active = moe.parameters(model)
    if "PipelineStage" in recipe:
        recipe["PipelineStage"] = static_stages(recipe, args, model, division)
    model = recipe["parallelize"](args, model, mesh, counter.device)
    optimizer = recipe["make_optimizer"](args, model)
    averages = average.Average(model, vars(args).get("ema", 0.0))
    finite = guard.FiniteGuard(model, optimizer, plan, args.max_skips)
    batches = data.Loader(train, sampler.training_requests(plan, dp_rank), 0, counter.device)
    if change:
        change(recipe, model)
    number = 0

    def step() -> Any:
        nonlocal number
        number += 1
        gc.collect()  # and not at some time in the step, which other modules' objects decide
        counter.begin()
        sums = recipe["train_step"](args, model, optimizer, finite, batches, dp_size)
        finite.restore_if_skipped(number)
        averages.update()
        return sums

    gc.disable()
    for _ in range(WARM_STEPS):
        step()
    sums = step()
    found: dict[str, Any] = {
        "step": counter.report(),
        "micro_batches": micro_batches,
        "counted": division.num_micro_batches,
        "samples": samples,
        "parameters": total,
        "active": active,
        "idle": (idle := idle_share(model)),
        "stages": dist.get_process_group_ranks(mesh.get_group("pp")) if idle else [],
    }
    del sums
    if only_step:
        found["memory"] = at_peak(counter, model, optimizer, step)
        states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        states += averages.tensors.values()
        own = sum(map(_bytes, (_local(one) for one in model.parameters())))
        found["state_bytes"] = whole * (1 + sum(_bytes(_local(one)) for one in states) / max(own, 1))
        return found
    counter.begin()
    requests = sampler.evaluation_requests(plan, division.global_micro_batch_size, dp_rank)
    recipe["evaluate"](args, model, data.Loader(train, requests, 0, counter.device))
    found["evaluate"] = counter.report()
    counter.begin()
    state_check.StateCheck(model, compare=True).summarize(keymap.model_tensors(model))
    found["check"] = counter.report()
    return found


def _local(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def at_peak(counter: Counter, model: Any, optimizer: Any, step: Callable[[], None]) -> dict[str, int]:
    """Bytes by kind at the peak of a step: the step is run again, and looked at when the peak is reached."""
    parameters = [one for one in model.parameters() if one.numel()]
    lasting = {_local(one).untyped_storage()._cdata for one in parameters}
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    state = {_local(one).untyped_storage()._cdata for one in states}
    found: dict[str, int] = {}

    def look() -> None:
        counter.look = None
        held = [_local(one.grad) for one in parameters if one.grad is not None]
        held += [flat for one in model.modules() if isinstance(one, fake_device.Replicas) for flat in one.buckets]
        gradients = {one.untyped_storage()._cdata for one in held}
        for kind, keys in zip(KINDS, (lasting, gradients - lasting, state), strict=False):
            found[kind] = sum(counter.live.get(key, 0) for key in keys)
        found[KINDS[-1]] = counter.peak_bytes - sum(found.values())

    counter.look, counter.look_at = look, counter.peak_at
    step()
    return found


def idle_share(model: Any) -> float:
    """Of a pipeline's step; 0 for a model that has no schedule of torch."""
    schedule: Any = getattr(model, "schedule", None)
    stages: list[Any] = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    if not hasattr(stages[0], "group_size"):
        return 0.0
    size = stages[0].group_size
    return orders.idle_share(orders.of_schedule(schedule, size, schedule._n_microbatches)) if size > 1 else 0.0


def in_child(case: dict[str, Any], answer: Callable[..., dict[str, Any]] = measure) -> str:
    """Measure a case in a process of its own, which this one, with torch imported, forks; a line of JSON.

    What the recipe prints is dropped; an error is `{"error": ..., "refused": whether the recipe refuses the flags}`.
    """
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.close(reading)
        said = io.StringIO()
        with (
            os.fdopen(writing, "w") as out,
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(said),
        ):
            try:
                json.dump(answer(**case), out)
            except UserError as error:
                json.dump({"error": str(error), "refused": True}, out)
            except SystemExit:  # of the command line, which has printed what is wrong between two lines
                parts = re.split("[-\u2500]{9,}", said.getvalue())
                words = re.sub("[^ -~]+", " ", parts[min(1, len(parts) - 1)]).split()
                json.dump({"error": " ".join(words), "refused": True}, out)
            except Exception as error:
                first = str(error).strip().partition("\n")[0]
                trace = traceback.format_exc()
                json.dump({"error": f"{type(error).__name__}: {first}", "refused": False, "trace": trace}, out)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        found = answers.read()
    _, status = os.waitpid(child, 0)
    return found or json.dumps({"error": f"the process that counts ended with {status}", "refused": False})


def of_rank(case: dict[str, Any]) -> dict[str, Any]:
    """What one rank does; a step of many micro-batches is known from two of few."""
    found = json.loads(in_child(case | {"few": 0}))
    if found.get("counted") == found.get("micro_batches"):  # or an error
        return found
    second = json.loads(in_child(case | {"few": 1}))
    return second if "error" in second else repeat.more(found, second)


def each_that_differs(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What rank 0 does; of a pipeline also the second and the last stage, which hold and do something else."""
    found = of_rank(case)
    yield found
    stages = found.get("stages", [])
    for rank in sorted({*stages[1:2], *stages[-1:]}):
        yield of_rank(case | {"rank": rank})


def main() -> None:
    """Read cases from standard input, and print a line for each: a list of its ranks, which an error ends."""
    for case in json.load(sys.stdin):
        found: list[dict[str, Any]] = []
        for one in each_that_differs(case):
            found = [*found, one]
            if "error" in one:
                break
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
