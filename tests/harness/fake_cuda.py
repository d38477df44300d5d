"""Steps of the recipes on CUDA tensors without a GPU: torch runs the code that it runs on CUDA, and no kernel.

Tensors are fake: they have a shape, a type, a device and no data. So the dispatcher, AutocastCUDA's rules, autograd,
FSDP2, DTensor, pipelines and fused optimizers take the branches that they take on a GPU, and this module counts what
they would launch, copy, cast, send and hold. The process group is torch's "fake": any number of ranks, of which this
process is one, and nothing is sent.

It replaces, because none of it can run without a device:

- `at::cuda::detail::_hasPrimaryContext`, in the memory of this process, by a function that answers no: the backward
  pass asks it. No compiler, driver or preloaded library is needed; the processor must be an x86-64;
- device counts, names, streams and events of `torch.cuda`: a race between streams cannot be seen;
- DistributedDataParallel's C++ reducer, by `Replicas`, which forms the same buckets and calls the same all-reduces;
- the choice of an attention kernel: flash attention is taken; and the algorithms of cuDNN, which nothing chooses;
- the DataLoader, by a loop that neither pins nor forks; the batches are not data, and go through `data._ahead`;
- `ranks.gather`, which sends Python objects: every rank has said the same.

It also cannot see NCCL, kernels' host code that waits, CUDA's allocator (the peak is
of live bytes, without caching and workspaces), and any time.

Run as `python -m tests.harness.fake_cuda '[{"recipe": "ddp_gpt", "size": 8, "flags": []}]'`: it changes torch for the
whole process, so nobody imports it into the tests. It prints a line of JSON for each case.
"""

import collections
import contextlib
import copy
import ctypes
import dataclasses
import functools
import gc
import json
import mmap
import os
import platform
import runpy
import sys
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from common import data, guard, keymap, process_group, ranks, sampler
from launch import strategy
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

ROOT = Path(__file__).resolve().parents[2]
DEVICE = torch.device("cuda", 0)
GPUS_A_MACHINE = 8
NAME = "NVIDIA H100 80GB HBM3"
WARM_STEPS = 1  # creates what lasts: the optimizer's state, FSDP's order of blocks
SMALL_BYTES = 1000
BUCKETS_BYTES = [2**20, 25 * 2**20]  # of torch's DDP: the first bucket, and all others
aten = torch.ops.aten

# --- what torch asks a driver for ------------------------------------------------------------------------------


def without_contexts() -> None:
    """Let the backward pass find that no GPU of this process has been used yet, as is true.

    It asks `at::cuda::detail::_hasPrimaryContext`, which fails without a driver. libc10_cuda.so has its address: the
    function `c10::cuda::hasPrimaryContext` is a jump to it (ff 25, and the place of the address). There, this writes
    "return false", into the memory of this process only.
    """
    if platform.machine() != "x86_64":
        raise NotImplementedError(f"the two instructions are of an x86-64, and this is an {platform.machine()}")
    library: Any = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10_cuda.so"))
    jump = ctypes.cast(library._ZN3c104cuda17hasPrimaryContextEa, ctypes.c_void_p).value or 0
    after = ctypes.string_at(jump, 16).index(b"\xff\x25") + 2
    offset = int.from_bytes(ctypes.string_at(jump + after, 4), "little", signed=True)
    address = ctypes.c_void_p.from_address(jump + after + 4 + offset).value or 0
    page = address & ~(mmap.PAGESIZE - 1)
    every = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), ctypes.c_size_t(2 * mmap.PAGESIZE), every):
        raise OSError("the system allows no change of a function of libtorch_cuda.so")
    ctypes.memmove(address, b"\x31\xc0\xc3", 3)  # xor eax, eax; ret


class Event:
    """Of CUDA, and a stream as well: nothing is ever waited for. A wait of the host for it is counted by `Counter`."""

    device = DEVICE
    device_index = 0
    cuda_stream = 0
    stream_id = 0
    device_type = 1  # CUDA's number

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> "Event":
        return Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        synchronized()


def synchronized(*_: Any) -> None:
    """What a call that waits for the device does: it is counted."""
    if Counter.current:
        Counter.current.sync("synchronize")


def read_list(tensor: torch.Tensor) -> Any:
    """`tolist`: one wait, and ones, as a fake tensor has no values."""
    if tensor.is_cuda and Counter.current:
        Counter.current.sync("tolist")
    return np.ones(tensor.shape, int).tolist()


@contextlib.contextmanager
def without_driver(size: int, rank: int) -> Iterator[None]:
    """Let torch believe in GPUs, and in a process group of this size."""
    without_contexts()
    properties = SimpleNamespace(
        name=NAME, total_memory=80 * 2**30, major=9, minor=0, multi_processor_count=132, uuid=""
    )
    stream = Event()
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: min(size, GPUS_A_MACHINE),
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "synchronize": synchronized,
        "empty_cache": lambda: None,
        "get_device_name": lambda *_: NAME,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: properties,
        "is_bf16_supported": lambda *_, **__: True,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "Stream": Event,
        "Event": Event,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda *_: contextlib.nullcontext(),
        "device": lambda *_: contextlib.nullcontext(),
    }
    replaced: list[tuple[Any, str, Any]] = [
        *((torch.cuda, name, value) for name, value in cuda.items()),
        # Although there are GPUs, as it seems, a fake tensor must not start CUDA.
        (FakeTensorMode, "avoid_device_init", property(lambda self: True)),
        (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        (torch.utils, "swap_tensors", swap),
        (FakeTensor, "tolist", read_list),
        (torch.Tensor, "record_stream", lambda *_: None),
        (torch.Tensor, "pin_memory", lambda tensor, *_: tensor),
        (nn.functional, "scaled_dot_product_attention", flash_attention),
        (nn.parallel, "DistributedDataParallel", Replicas),
        (data, "DataLoader", plain_loader),
        (ranks, "gather", lambda value, group=None: [value] * dist.get_world_size(group)),
        (DeviceMesh, "__init__", with_values(DeviceMesh.__init__)),
        # torch itself looks for an accelerator, and finds none.
        (_fsdp_init, "init_device_mesh", with_values(lambda _, **shape: init_device_mesh("cuda", **shape))),
        (DeviceMesh, "mesh", property(with_values(DeviceMesh.mesh.fget))),
    ]
    environment = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": min(size, GPUS_A_MACHINE)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {key: str(value) for key, value in environment.items()}))
        for place, name, value in replaced:
            stack.enter_context(mock.patch.object(place, name, value))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            yield
        finally:
            dist.destroy_process_group()


def with_values(function: Any) -> Any:
    """A function whose tensors are real, as those that hold the ranks of a mesh must be."""

    @functools.wraps(function)
    def real(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return real


swap_checked = torch.utils.swap_tensors


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """What `Module.to` does to a fake parameter, also where torch's own caches have a weak reference of it."""
    with mock.patch.object(weakref, "getweakrefs", return_value=[]):
        swap_checked(one, other)


def flash_attention(
    query: Any, key: Any, value: Any, *, is_causal: bool = False, enable_gqa: bool = False, **_: Any
) -> torch.Tensor:
    """The kernel that torch takes first on an H100, for bfloat16. Keys and values of grouped heads are not repeated."""
    return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[0]


def plain_loader(reads: Any, sampler: Any, **_: Any) -> Iterator[Any]:
    """The batches of the requests, one after the other."""
    return (reads[request] for request in sampler)


# --- DistributedDataParallel -------------------------------------------------------------------------------------


class Replicas(nn.Module):
    """DistributedDataParallel without its C++ reducer: the same buckets, and the same calls.

    As soon as a gradient is there, the reducer divides it by the number of ranks into its part of a bucket; when a
    bucket is full, it is all-reduced. Buffers are broadcast from rank 0 before a forward pass, in one flat tensor of
    each type. (torch/csrc/distributed/c10d/reducer.cpp; torch/nn/parallel/distributed.py, `_sync_module_buffers`.)
    """

    def __init__(self, module: nn.Module, process_group: Any = None, bucket_cap_mb: Any = None, **_: Any) -> None:
        super().__init__()
        self.module = module
        self.process_group = process_group or dist.group.WORLD
        self.broadcast_buffers = True
        self.require_backward_grad_sync = True
        self._hook: Any = None
        trained = [p for p in module.parameters() if p.requires_grad][::-1]
        limits = [bucket_cap_mb * 2**20] if bucket_cap_mb else BUCKETS_BYTES
        self._full: list[int] = []
        self._views: dict[int, tuple[int, torch.Tensor]] = {}
        self._flat: list[torch.Tensor] = []
        self._missing: list[int] = []
        for bucket in _buckets(trained, limits):
            flat = torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype, device=bucket[0].device)
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                view = part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
                self._views[id(parameter)] = (len(self._flat), view)
                parameter.register_post_accumulate_grad_hook(self._ready)
            self._flat.append(flat)
            self._full.append(len(bucket))
        self._missing = list(self._full)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Broadcast buffers, then the module's own."""
        buffers = list(self.module.buffers())
        if torch.is_grad_enabled() and self.require_backward_grad_sync and self.broadcast_buffers and buffers:
            for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
                same = [buffer for buffer in buffers if buffer.dtype == dtype]
                flat = torch.cat([buffer.flatten() for buffer in same])
                dist.broadcast(flat, 0, group=self.process_group)
                for buffer, part in zip(same, flat.split([b.numel() for b in same]), strict=True):
                    buffer.copy_(part.view_as(buffer))
        return self.module(*args, **kwargs)

    def _ready(self, parameter: torch.Tensor) -> None:
        if not self.require_backward_grad_sync:
            return
        bucket, view = self._views[id(parameter)]
        torch.mul(parameter.grad, 1 / dist.get_world_size(self.process_group), out=view)
        parameter.grad = view
        self._missing[bucket] -= 1
        if not self._missing[bucket]:
            self._missing[bucket] = self._full[bucket]
            dist.all_reduce(self._flat[bucket], group=self.process_group)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Send nothing."""
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = True


def _buckets(parameters: list[Any], limits: list[int]) -> Iterator[list[Any]]:
    """As `_compute_bucket_assignment_by_size` forms them: a bucket is full when it has reached its limit."""
    bucket: list[Any] = []
    limit = 0
    for parameter in parameters:
        bucket.append(parameter)
        if sum(p.numel() * p.element_size() for p in bucket) >= limits[min(limit, len(limits) - 1)]:
            yield bucket
            bucket, limit = [], limit + 1
    if bucket:
        yield bucket


# --- what is counted ---------------------------------------------------------------------------------------------

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


@dataclasses.dataclass
class Traffic:
    """Collectives of one kind over one group."""

    calls: int = 0
    bytes: int = 0
    small_calls: int = 0  # of less than SMALL_BYTES, such as a norm's: they are counted, and their bytes are not


class Counter(TorchDispatchMode):
    """Counts the operators of CUDA tensors, between `begin` and the end; and live bytes, always."""

    current: "Counter | None" = None

    def __init__(self, axes: dict[str, str]) -> None:
        super().__init__()
        self.axes = axes  # by group name
        self.live: dict[int, int] = {}
        self.live_bytes = 0
        self.begin()

    def begin(self) -> None:
        """Forget what was counted."""
        self.syncs: collections.Counter[str] = collections.Counter()
        self.cpu_tensors: collections.Counter[str] = collections.Counter()
        self.to_host = self.from_host = 0
        self.casts: collections.Counter[str] = collections.Counter()
        self.cast_elements: collections.Counter[str] = collections.Counter()
        self.kernels: collections.Counter[str] = collections.Counter()
        self.products: collections.Counter[tuple[int, int]] = collections.Counter()  # (FLOPs, bytes) of each
        self.elementwise_bytes = 0
        self.sent: dict[tuple[str, str], Traffic] = {}
        self.peak_bytes = self.live_bytes

    def report(self) -> dict[str, Any]:
        """What was counted, as JSON values."""
        sent = {f"{kind} {axis}": dataclasses.asdict(one) for (kind, axis), one in sorted(self.sent.items())}
        return {
            "syncs": dict(self.syncs),
            "to_host": self.to_host,
            "from_host": self.from_host,
            "cpu_tensors": dict(self.cpu_tensors),
            "casts": dict(self.casts),
            "cast_elements": dict(self.cast_elements),
            "kernels": self.kernels.total(),
            "products": sorted([flops, moved, count] for (flops, moved), count in self.products.items()),
            "elementwise_bytes": self.elementwise_bytes,
            "sent": sent,
            "held_bytes": self.live_bytes,
            "peak_bytes": self.peak_bytes,
        }

    def __enter__(self) -> "Counter":
        Counter.current = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        Counter.current = None
        super().__exit__(*error)

    def axis(self, group: str) -> str:
        """The axis of a group; of one that a library has made, how many ranks it has."""
        if group not in self.axes:
            made = distributed_c10d._resolve_process_group(group)
            self.axes[group] = f"of {dist.get_world_size(made)}"
        return self.axes[group]

    def sync(self, what: str) -> None:
        """The host waits for the device."""
        self.syncs[f"{what} at {_place()}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # they call the operators of their parts, which are counted
        kwargs = kwargs or {}
        name = func._schema.name
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        if name in ("aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero") and on_gpu:
            self.sync(name)
            return 1  # a fake tensor has no value
        if name in ("aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2") and on_gpu:
            self.sync(name)
        # No fused SGD for fake tensors: it changes its arguments, and returns nothing.
        out = None if name == "aten::_fused_sgd_" else func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        for tensor in (*results, *tensors):
            self._hold(tensor)
        if name in COLLECTIVES:
            self._count_collective(name, func, args, kwargs, results)
        elif on_gpu or any(tensor.is_cuda for tensor in results):
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
        counted = results if index < 0 else [one for one in tree_leaves(args[index]) if isinstance(one, torch.Tensor)]
        traffic = self.sent.setdefault((kind, self.axis(group)), Traffic())
        sent = sum(map(_bytes, counted))
        if sent < SMALL_BYTES:
            traffic.small_calls += 1
        else:
            traffic.calls += 1
            traffic.bytes += sent

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
        elif any(tensor.device.type == "cpu" and tensor.ndim for tensor in tensors):
            self.cpu_tensors[f"{name} at {_place()}"] += 1
        self.kernels[name] += 1
        moved = sum(_bytes(tensor) for tensor in (*tensors, *results) if tensor.is_cuda)
        if func._overloadpacket in flop_registry:
            self.products[flop_registry[func._overloadpacket](*args, **kwargs, out_val=out), moved] += 1
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
        if not tensor.is_cuda:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        if key not in self.live:
            weakref.finalize(storage, self._free, key)
            self.live[key] = 0
        self.live_bytes += size - self.live[key]
        self.live[key] = size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _free(self, key: int) -> None:
        self.live_bytes -= self.live.pop(key, 0)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _place() -> str:
    """The file and line of ours that is nearest to what runs."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and path.parts[len(ROOT.parts)] in ("recipes", "common"):
            return f"{path.relative_to(ROOT)}:{frame.lineno}"
    return "torch"


# --- a run ---------------------------------------------------------------------------------------------------------


class Reader:
    """A data set without data: batches of the shapes and types that common/workloads reads."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._one = (inputs, targets)
        self.sample_units: dict[str, int] = {}
        self.channels, self.size = (inputs.shape[1], inputs.shape[2]) if inputs.ndim == 4 else (0, 0)
        self.class_names = [str(i) for i in range(1000)]
        self.vocab_size = 256

    def __len__(self) -> int:
        return 2**20

    def read(self, epochs: np.ndarray, indices: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Tensors of this many samples."""
        return tuple(torch.empty(len(indices), *one.shape[1:], dtype=one.dtype) for one in self._one)


def reader(args: Any) -> Reader:
    """What a recipe's flags ask for: sequences, or images of 3 channels."""
    if hasattr(args, "seq_len"):
        found = Reader(*(torch.empty(1, args.seq_len, dtype=torch.long) for _ in range(2)))
        found.vocab_size = args.vocab_size or 256
        return found
    side = args.image_size or 32
    return Reader(torch.empty(1, 3, side, side, dtype=torch.uint8), torch.empty(1, dtype=torch.long))


def static_stages(recipe: Any, args: Any, whole: Any, division: sampler.Division) -> Any:
    """PipelineStage with the shapes that ranks otherwise tell each other at the start, which a fake group cannot."""
    from torch.distributed.pipelining import PipelineStage

    def make(stage: Any, index: int, num_stages: int, device: torch.device, group: Any) -> Any:
        size = (division.micro_batch_size, args.seq_len)
        first = copy.deepcopy(whole).to_empty(device=device)  # its first block gives the type that stages send
        for name in list(first.blocks)[1:]:
            del first.blocks[name]
        first.norm = first.head = None
        dtype = recipe["precision"].compute_dtype(args.dtype, device)
        first.to(recipe["precision"].param_dtype(dtype))
        with torch.no_grad():
            tokens = torch.empty(size, dtype=torch.long, device=device)
            sent = recipe["precision"].autocast(device, dtype)(first.forward)(tokens)
        given = tokens if index == 0 else torch.empty_like(sent, requires_grad=True)
        is_last = index == num_stages - 1
        with torch.enable_grad():
            out = stage(given) if is_last else torch.empty_like(sent, requires_grad=True)
        return PipelineStage(stage, index, num_stages, device, group=group, input_args=given, output_args=out)

    return make


def axis_names(mesh: DeviceMesh) -> dict[str, str]:
    """The axis of each group of a mesh, by the group's name; of axes that DTensor has merged, their names together."""
    found = {mesh.get_group(axis).group_name: axis for axis in mesh.mesh_dim_names or ()}
    merged: dict[str, DeviceMesh] = getattr(mesh, "_flatten_mapping", {})
    return found | {axes.get_group().group_name: axis for axis, axes in merged.items()}


def measure(
    recipe_name: str, size: int, flags: list[str], rank: int = 0, mutant: str = "", config: str = ""
) -> dict[str, Any]:
    """Count what a rank does in the second training step, in an evaluation and in a comparison of the replicas.

    Args:
        recipe_name: whose train.py.
        size: number of ranks.
        flags: of the recipe.
        rank: whose part.
        mutant: one of `MUTANTS`, or "".
        config: name of a file of accelerate_gpt's configs/, or "".
    """
    path = ROOT / "recipes" / recipe_name / "train.py"
    accelerate = strategy.environment(str(path.parent / "configs" / config)) if config else {}
    with mock.patch.dict(os.environ, accelerate), without_driver(size, rank):
        recipe = runpy.run_path(str(path))
        functions = recipe["make_model"].__globals__
        if "DistributedDataParallel" in functions:
            functions["DistributedDataParallel"] = Replicas
        args = parse(recipe["Args"], flags)
        world: Any = process_group.World(
            rank, size, min(size, GPUS_A_MACHINE), "host", DEVICE, "cpu:gloo,cuda:nccl", None
        )
        with (
            mock.patch.object(process_group, "joined", world),
            torch.autograd.set_multithreading_enabled(False),  # the device's thread would have to be started by CUDA
        ):
            mesh = functions["make_mesh"](args, world)
            counter = Counter(axis_names(mesh))
            with FakeTensorMode(allow_non_fake_inputs=True), resizing(counter), counter:
                return _steps(functions, args, mesh, counter, mutant)


def parse(kind: Any, flags: list[str]) -> Any:
    """The recipe's arguments, without a look at the command line of this process."""
    import tyro

    return tyro.cli(kind, args=flags)


@contextlib.contextmanager
def resizing(counter: Counter) -> Iterator[None]:
    """Count storages that FSDP frees and fills again."""
    before = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        done = before(storage, size)
        key = storage._cdata
        if key in counter.live:
            counter.live_bytes += size - counter.live[key]
            counter.live[key] = size
            counter.peak_bytes = max(counter.peak_bytes, counter.live_bytes)
        return done

    with mock.patch.object(torch.UntypedStorage, "resize_", resize):
        yield


def _steps(recipe: Any, args: Any, mesh: Any, counter: Counter, mutant: str) -> dict[str, Any]:
    """As `main` of the recipes, without what surrounds a step."""
    dp_rank, dp_size = recipe["dp_coordinates"](mesh)
    division = sampler.divide_batch(args.global_batch_size, args.micro_batch_size, dp_size)
    train = reader(args)
    plan = sampler.make_plan(division, len(train), run_seed=0, epochs=0, max_steps=WARM_STEPS + 3, progress={})
    model = recipe["make_model"](args, train)
    if "PipelineStage" in recipe:
        recipe["PipelineStage"] = static_stages(recipe, args, model, division)
    model = recipe["parallelize"](args, model, mesh, DEVICE)
    optimizer = recipe["make_optimizer"](args, model)
    finite = guard.FiniteGuard(model, optimizer, plan, args.max_skips)
    batches = data.Loader(train, sampler.training_requests(plan, dp_rank), 0, DEVICE)
    MUTANTS[mutant](recipe, model)
    found = {}
    gc.disable()
    for step in range(1, WARM_STEPS + 2):
        gc.collect()  # and not at some time in the step, which other modules' objects decide
        counter.begin()
        sums, grad_norm = recipe["train_step"](args, model, optimizer, finite, batches, dp_size)
        finite.restore_if_skipped(step)
    found["step"] = counter.report()
    del sums, grad_norm
    counter.begin()
    requests = sampler.evaluation_requests(plan, division.global_micro_batch_size, dp_rank)
    recipe["evaluate"](args, model, data.Loader(train, requests, 0, DEVICE))
    found["evaluate"] = counter.report()
    counter.begin()
    guard.StateCheck(model, compare=True).summarize(keymap.model_tensors(model))
    found["check"] = counter.report()
    return found


# --- mutants: each is a mistake that the counts must show -----------------------------------------------------------


def _before_step(recipe: Any, action: Any) -> None:
    plain = recipe["clip_gradients"]

    def clip(args: Any, model: Any) -> Any:
        action(model)
        return plain(args, model)

    recipe["clip_gradients"] = clip


def _item(recipe: Any, model: Any) -> None:
    _before_step(recipe, lambda model: next(model.parameters()).sum().item())


def _cast(recipe: Any, model: Any) -> None:
    _before_step(recipe, lambda model: next(model.parameters()).detach().to(torch.float16))


def _cpu_index(recipe: Any, model: Any) -> None:
    _before_step(recipe, lambda model: torch.zeros(4, 4, device=DEVICE)[torch.arange(2)])


def _to_host(recipe: Any, model: Any) -> None:
    _before_step(recipe, lambda model: torch.zeros(4, device=DEVICE).cpu())


def _lost_collective(recipe: Any, model: Any) -> None:
    """One block's gradients are not sent."""
    blocks = [module for name, module in model.named_modules() if name.endswith(("blocks.0", "layer1"))]
    for part in (model, *blocks):
        if hasattr(part, "set_requires_gradient_sync") and part is not model:
            model.set_requires_gradient_sync = lambda *_: None
            part.set_requires_gradient_sync(False)
        elif isinstance(part, Replicas):
            part._missing[-1] = 10**9  # so it is never full


def _held(recipe: Any, model: Any) -> None:
    """Something that lasts is kept from each step."""
    kept: list[Any] = []
    _before_step(recipe, lambda model: kept.append(torch.zeros(2**20, device=DEVICE)))


MUTANTS = {
    "": lambda recipe, model: None,
    "item": _item,
    "cast": _cast,
    "cpu index": _cpu_index,
    "to host": _to_host,
    "lost collective": _lost_collective,
    "held": _held,
}


def main() -> None:
    """Measure each case in a process of its own, which this one, with torch imported, forks."""
    for case in json.loads(sys.argv[1]):
        reading, writing = os.pipe()
        if not (child := os.fork()):
            os.close(reading)
            with os.fdopen(writing, "w") as out:
                try:
                    json.dump(measure(**case), out)
                except Exception:
                    json.dump({"error": traceback.format_exc()}, out)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answers:
            print(answers.read(), flush=True)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
