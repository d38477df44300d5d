"""Steps of recipes on tensors without data: torch runs the code that it runs on GPUs or CPUs, and no kernel.

Tensors are fake: they have a shape, a type, a device and no data. So the dispatcher, autocast's rules, autograd, FSDP2,
DTensor, pipelines and fused optimizers take the branches that they take in a run. The process group is torch's "fake":
any number of ranks, of which this process is one, and nothing is sent.

It replaces, because none of it can run without a device or other ranks:

- `at::cuda::detail::_hasPrimaryContext`, in the memory of this process, by a function that answers no: the backward
  pass asks it. No compiler, driver or preloaded library is needed; the processor must be an x86-64 or an aarch64;
- device counts, names, streams and events of `torch.cuda`: a race between streams cannot be seen;
- DistributedDataParallel's C++ reducer, by `Replicas`, which forms the same buckets and calls the same all-reduces;
- the choice of an attention kernel: flash attention is taken; and the algorithms of cuDNN, which nothing chooses;
- the DataLoader, by a loop that neither pins nor forks; the batches are not data, and go through `data.Loader`;
- `ranks.gather`, which sends Python objects: every rank has said the same;
- groups and parts of other ranks, which nobody asks for: with 65,536 ranks, they would take minutes.

It also cannot see NCCL, kernels' host code that waits, an allocator (a peak is of live bytes, without caching and
workspaces), and any time. It changes torch for the whole process: use it in a process of its own.
"""

import contextlib
import ctypes
import functools
import mmap
import os
import platform
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from common import UserError, ranks
from common.train import data
from common.workloads import moe

BUCKETS_BYTES = [2**20, 25 * 2**20]  # of torch's DDP: the first bucket, and all others
aten = torch.ops.aten
waits: list[Callable[[str], None]] = []  # called where the host would wait for the device

# --- what torch asks a driver for ------------------------------------------------------------------------------


# Instructions that return false: `xor eax, eax; ret`, and `mov w0, #0; ret` (Arm ARM, C6.2: MOVZ and RET).
RETURN_FALSE = {"x86_64": b"\x31\xc0\xc3", "aarch64": b"\x00\x00\x80\x52\xc0\x03\x5f\xd6"}


def without_contexts() -> None:
    """Let the backward pass find that no GPU of this process has been used yet, as is true.

    It asks `at::cuda::detail::_hasPrimaryContext`, which fails without a driver and is not exported. In its place, this
    writes "return false", into the memory of this process only.

    Raises:
        UserError: this torch was built without CUDA, or such a processor is not known.
        OSError: the system allows no change of a function.
    """
    path = Path(torch.__file__).parent / "lib" / "libc10_cuda.so"
    code = RETURN_FALSE.get(platform.machine(), b"")
    if not code or not path.exists():
        raise UserError(
            f"planning for GPUs needs a torch that was built for CUDA, and {' or '.join(RETURN_FALSE)}; this is torch "
            f"{torch.__version__} on {platform.machine()}: plan on another machine, which needs no GPU"
        )
    write_code(_has_primary_context(ctypes.CDLL(str(path)), path), code)


def _has_primary_context(library: Any, path: Path) -> int:
    """The address of `_hasPrimaryContext`, which libtorch_cuda.so has registered in libc10_cuda.so.

    It stands in the one word of the library's data that another registration changes. No instruction is decoded, so
    this holds on any processor.
    """
    register = library._ZN3c104cuda9_internal20setHasPrimaryContextEPFbaE
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ends = [one[0].split("-") for one in maps if one[1] == "rw-p" and one[-1] == str(path.resolve())]
    places = [(int(start, 16), int(end, 16) - int(start, 16)) for start, end in ends]
    before = [ctypes.string_at(*place) for place in places]
    other = ctypes.CDLL(None).abs
    register(other)
    after = [ctypes.string_at(*place) for place in places]
    wanted = ctypes.cast(other, ctypes.c_void_p).value
    words = [[np.frombuffer(content, np.uint64) for content in contents] for contents in (before, after)]
    changed = [
        int(was[i]) for was, now in zip(*words, strict=True) for i in np.flatnonzero(was != now) if now[i] == wanted
    ]
    assert len(changed) == 1, f"{len(changed)} words of {path} have changed"
    register(ctypes.c_void_p(changed[0]))
    return changed[0]


def write_code(address: int, code: bytes) -> None:
    """Write instructions over a function of this process.

    Meanwhile its pages are not executable: when they become so, Linux lets the instruction cache see the change, which
    an Arm processor does not do by itself.
    """
    page = address & ~(mmap.PAGESIZE - 1)
    size = -(-(address + len(code) - page) // mmap.PAGESIZE) * mmap.PAGESIZE
    protect = functools.partial(ctypes.CDLL(None).mprotect, ctypes.c_void_p(page), ctypes.c_size_t(size))
    allowed = protect(mmap.PROT_READ | mmap.PROT_WRITE) == 0
    if allowed:
        ctypes.memmove(address, code, len(code))
    if not allowed or protect(mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError("the system allows no change of a function of libtorch_cuda.so")


class Event:
    """Of CUDA, and a stream as well: nothing is ever waited for. The host's waits are counted."""

    device = torch.device("cuda", 0)
    device_index = 0
    cuda_stream = 0
    stream_id = 0
    device_type = 1  # CUDA's number

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None:
        """Nothing is under way."""

    wait = wait_event = wait_stream = record

    def record_event(self, *_: Any) -> "Event":
        """Another one."""
        return Event()

    def query(self) -> bool:
        """Whether it has come."""
        return True

    def synchronize(self) -> None:
        """The host waits."""
        synchronized()


def waited(what: str) -> None:
    """The host waits for the device."""
    for call in waits:
        call(what)


def synchronized(*_: Any) -> None:
    """What a call that waits for the device does: it is counted."""
    waited("synchronize")


def read_list(tensor: torch.Tensor) -> Any:
    """`tolist`: one wait, and ones, as a fake tensor has no values."""
    if tensor.is_cuda:
        waited("tolist")
    return np.ones(tensor.shape, int).tolist()


def read_counts(counts: torch.Tensor, rows: int) -> Any:
    """`moe.to_host`: one wait, and a balanced load."""
    if counts.is_cuda:
        waited("tolist")
    return moe.equal_shares(counts, rows)


@contextlib.contextmanager
def ranks_without_devices(
    device: torch.device, size: int, rank: int, local_size: int, gpu: str = "", memory_bytes: int = 0, bf16: bool = True
) -> Iterator[None]:
    """Let torch believe in these devices, and in a process group of this size.

    Args:
        device: whose tensors are counted, of type cuda or cpu.
        size: number of ranks.
        rank: the one that this process is.
        local_size: ranks on a machine.
        gpu: name of each GPU, as `torch.cuda.get_device_name` says it.
        memory_bytes: of a GPU.
        bf16: whether it computes in bfloat16.
    """
    replaced: list[tuple[Any, str, Any]] = [
        (torch.utils, "swap_tensors", swap),
        (FakeTensor, "tolist", read_list),
        (moe, "to_host", read_counts),
        (nn.functional, "scaled_dot_product_attention", functools.partial(flash_attention, device.type)),
        (nn.parallel, "DistributedDataParallel", Replicas),
        (data, "DataLoader", plain_loader),
        (ranks, "gather", lambda value, group=None: [value] * dist.get_world_size(group)),
        (DeviceMesh, "__init__", with_values(DeviceMesh.__init__)),
        (DeviceMesh, "mesh", property(with_values(ranks_of_mesh))),
        (device_mesh, "new_group", own_group),
        (_fsdp_param, "_chunk_with_empty", Chunks),
    ]
    if device.type == "cuda":
        without_contexts()
        replaced += no_driver(min(size, local_size), gpu, memory_bytes, bf16)
    environment = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": min(size, local_size)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {key: str(value) for key, value in environment.items()}))
        for place, name, value in replaced:
            stack.enter_context(mock.patch.object(place, name, value))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            yield
        finally:
            dist.destroy_process_group()


def no_driver(count: int, gpu: str, memory_bytes: int, bf16: bool) -> list[tuple[Any, str, Any]]:
    """What is replaced in torch.cuda, and where torch looks for an accelerator."""
    hopper = any(name in gpu for name in ("H100", "H200", "B200"))  # or later, whose grouped products are fast
    capability = (9 if hopper else 8 if bf16 else 7, 0)
    properties = SimpleNamespace(
        name=gpu, total_memory=memory_bytes, major=capability[0], minor=0, multi_processor_count=132, uuid=""
    )
    stream = Event()
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "_lazy_init": lambda: None,
        "synchronize": synchronized,
        "empty_cache": lambda: None,
        "get_device_name": lambda *_: gpu,
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: properties,
        "is_bf16_supported": lambda *_, **__: bf16,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "manual_seed": lambda *_: None,
        "Stream": Event,
        "Event": Event,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda *_: contextlib.nullcontext(),
        "device": lambda *_: contextlib.nullcontext(),
    }
    return [
        *((torch.cuda, name, value) for name, value in cuda.items()),
        # Although there are GPUs, as it seems, a fake tensor must not start CUDA.
        (FakeTensorMode, "avoid_device_init", property(lambda self: True)),
        (fake_tensor, "init_gpu_context", lambda *_: None),  # torch 2.11 asks `torch.cuda.is_available` there
        (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        (torch.Tensor, "record_stream", lambda *_: None),
        (torch.Tensor, "pin_memory", lambda tensor, *_: tensor),
        # torch itself looks for an accelerator, and finds none.
        (_fsdp_init, "init_device_mesh", with_values(lambda _, **shape: init_device_mesh("cuda", **shape))),
    ]


new_group = device_mesh.new_group
mesh_property: Any = DeviceMesh.mesh


class Values(torch.Tensor):
    """A real tensor that stays real: also what is taken from it while other tensors are without data."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with the values."""
        with _disable_current_modes():
            return super().__torch_function__(func, types, args, kwargs or {})


def ranks_of_mesh(mesh: DeviceMesh) -> torch.Tensor:
    """`DeviceMesh.mesh`, as torch has it, for recipes that choose ranks by it."""
    found: torch.Tensor = mesh_property.fget(mesh)
    return found.as_subclass(Values)


def own_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A group that this rank is in; another one is never asked for, and thousands of them would take minutes."""
    if ranks is not None and dist.get_rank() not in ranks:
        return dist.GroupMember.NON_GROUP_MEMBER
    return new_group(ranks, *args, **kwargs)


class Chunks:
    """The parts into which FSDP cuts a parameter, as `torch.chunk` does: each when it is asked for, of thousands."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self._tensor = tensor
        self._dim = dim
        self._size = -(-tensor.shape[dim] // count)

    def __getitem__(self, index: int) -> torch.Tensor:
        left = self._tensor.shape[self._dim] - index * self._size
        if left <= 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, index * self._size, min(self._size, left))


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
    device: str, query: Any, key: Any, value: Any, *, is_causal: bool = False, enable_gqa: bool = False, **_: Any
) -> torch.Tensor:
    """The kernel that torch takes first. On GPUs, keys and values of grouped heads are not repeated."""
    if device == "cuda":
        return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[0]
    if enable_gqa and key.shape[1] != query.shape[1]:
        key, value = (one.repeat_interleave(query.shape[1] // key.shape[1], 1) for one in (key, value))
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)[0]


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
        self.buckets: list[torch.Tensor] = []
        self._missing: list[int] = []
        for bucket in _buckets(trained, limits):
            flat = torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype, device=bucket[0].device)
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                view = part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
                self._views[id(parameter)] = (len(self.buckets), view)
                parameter.register_post_accumulate_grad_hook(self._ready)
            self.buckets.append(flat)
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
        assert parameter.grad is not None
        torch.mul(parameter.grad, 1 / dist.get_world_size(self.process_group), out=view)
        parameter.grad = view
        self._missing[bucket] -= 1
        if not self._missing[bucket]:
            self._missing[bucket] = self._full[bucket]
            dist.all_reduce(self.buckets[bucket], group=self.process_group, async_op=True)

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
