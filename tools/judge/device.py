"""A script that asks for CUDA gets the CPU: devices are looked at on their way in, noted, and exchanged."""

import contextlib
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tools.judge.record import TORCH

CPU = torch.device("cpu")
NOTHING = (
    "synchronize empty_cache reset_peak_memory_stats reset_max_memory_allocated manual_seed manual_seed_all seed_all "
    "ipc_collect set_rng_state set_rng_state_all init memory_summary set_per_process_memory_fraction"
)
ZERO = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved utilization initial_seed"


def install(record: Any, place: Any) -> None:
    """Answer all questions about GPUs as a machine would that has one for each rank."""
    state = {"now": 0, "first": True}
    seen: set[tuple[str, int, bool]] = set()
    if not place.gpu:
        return

    def asked(device: Any) -> bool:
        """Note which GPU is asked for; whether it is one."""
        index: int | None
        if isinstance(device, torch.device):
            kind, index = device.type, device.index
        elif isinstance(device, str) and device.startswith("cuda"):
            kind, _, number = device.partition(":")
            index = int(number) if number.lstrip("-").isdigit() else None
        else:
            return False
        if kind != "cuda":
            return False
        note(index)
        return True

    def note(index: int | None) -> None:
        at = "" if getattr(record.busy, "on", False) else record.where()
        key = (at, state["now"] if index is None else index, index is not None)
        if at and key not in seen:
            seen.add(key)
            record.log("device", at=at, index=key[1], explicit=key[2], gpus=place.per_machine)

    def on_cpu(value: Any, whole: bool = False) -> Any:
        """The CPU for a GPU; a whole number is one where it stands for a device."""
        if whole and type(value) is int:
            note(value)
            return CPU
        if isinstance(value, torch.device | str) and asked(value):
            return CPU
        if isinstance(value, dict):
            return {key: on_cpu(one) for key, one in value.items()}
        return value

    class OnCpu(TorchFunctionMode):
        """Each call of torch, with the CPU where it says CUDA."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is torch.device:
                return func(*args, **kwargs)
            if func is torch.Tensor.cuda:
                target = args[1] if len(args) > 1 else kwargs.get("device")
                note(target) if target is None or isinstance(target, int) else asked(target)
                return args[0]
            if any(isinstance(one, torch.device | str) for one in args):
                args = tuple(map(on_cpu, args))
            if kwargs:
                kwargs = {name: on_cpu(one, whole=True) if name == "device" else one for name, one in kwargs.items()}
                kwargs.pop("pin_memory", None)
            if func is torch.Tensor.pin_memory:
                return args[0]
            return func(*args, **kwargs)

    OnCpu().__enter__()
    _questions(record, place, state, note)
    _moves(record, asked)
    _mixed(on_cpu)
    _default(on_cpu)


def _questions(record: Any, place: Any, state: dict[str, Any], note: Any) -> None:
    cuda: Any = torch.cuda

    def available() -> bool:
        if state["first"] and not sys._getframe(1).f_code.co_filename.startswith(TORCH):
            record.log("asks", what="is_available")
            state["first"] = False
        return True

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index < 0 and not record.direct():
            return  # torch's own way to say that nothing is to change
        state["now"] = index or 0
        note(state["now"])

    @contextlib.contextmanager
    def chosen(device: Any) -> Iterator[None]:
        before, state["now"] = state["now"], torch.device("cuda", device).index if isinstance(device, int) else 0
        yield
        state["now"] = before

    cuda.is_available, cuda.set_device, cuda.device = available, set_device, chosen
    cuda.device_count = lambda: place.per_machine
    cuda.current_device = lambda: state["now"]
    cuda.get_device_name = lambda *_: "judge"
    cuda.get_device_capability = lambda *_: (8, 0)
    cuda.get_device_properties = lambda device=None: _Properties(state["now"] if device is None else device)
    cuda.mem_get_info = lambda *_: (2**36, 2**36)
    cuda.is_current_stream_capturing = lambda: False
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.is_initialized = lambda: False
    cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    cuda.get_rng_state_all = lambda: [torch.zeros(16, dtype=torch.uint8)]
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda *_: _Stream()
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.memory_stats = lambda *_: {}
    for name in NOTHING.split():
        setattr(cuda, name, lambda *_, **__: None)
    for name in ZERO.split():
        setattr(cuda, name, lambda *_, **__: 0)
    accelerator: Any = torch.accelerator
    accelerator.is_available, accelerator.device_count = available, cuda.device_count
    accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
    accelerator.set_device_index = accelerator.set_device_idx = set_device
    accelerator.current_device_index = accelerator.current_device_idx = cuda.current_device
    accelerator.synchronize = lambda *_: None
    accelerator.current_stream = cuda.current_stream


class _Properties(types.SimpleNamespace):
    """What a GPU says of itself; 0 where nobody has asked yet."""

    def __init__(self, device: Any) -> None:
        """Of the GPU of this number or name."""
        super().__init__(name="judge", major=8, minor=0, total_memory=2**36, uuid=f"judge-{device}")

    def __getattr__(self, name: str) -> int:
        return 0


class _Stream:
    """A stream or an event on which nothing waits."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes what torch's own take."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: 0.0


def _moves(record: Any, asked: Any) -> None:
    """Note models that are moved, and whether DDP already held them."""
    to, cuda = nn.Module.to, nn.Module.cuda

    def moved(module: nn.Module) -> None:
        kind = type(module).__name__
        record.log("move", kind=kind, module=id(module), wrapped=kind == "DistributedDataParallel")

    @functools.wraps(to)
    def patched_to(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if any(asked(one) for one in (*args, *kwargs.values()) if isinstance(one, torch.device | str)):
            moved(self)
        elif args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = (torch.device("cuda", args[0]), *args[1:])
            asked(args[0])
            moved(self)
        return to(self, *args, **kwargs)

    @functools.wraps(cuda)
    def patched_cuda(self: nn.Module, device: Any = None) -> Any:
        moved(self)
        return cuda(self, device)

    module: Any = nn.Module
    module.to, module.cuda = patched_to, patched_cuda
    tensor_to = torch.Tensor.to

    def numbered(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """`tensor.to(0)` means GPU 0."""
        if args and type(args[0]) is int:
            args = (torch.device("cuda", args[0]), *args[1:])
        return tensor_to(self, *args, **kwargs)

    tensor: Any = torch.Tensor
    tensor.to = numbered
    tensor.pin_memory = lambda self, *_: self


def _mixed(on_cpu: Any) -> None:
    """Autocast and GradScaler on the CPU, in bfloat16: float16 is slow there, and a scaler finds no infinite value."""
    autocast: Any = torch.amp.autocast_mode.autocast
    init = autocast.__init__

    @functools.wraps(init)
    def patched(self: Any, device_type: str = "cuda", dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        init(self, "cpu", torch.bfloat16 if dtype is torch.float16 else dtype, *args, **kwargs)

    autocast.__init__ = patched
    scaler: Any = torch.amp.GradScaler
    scaler_init = scaler.__init__

    @functools.wraps(scaler_init)
    def on_the_cpu(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        scaler_init(self, "cpu", *args, **kwargs)

    scaler.__init__ = on_the_cpu


def _default(on_cpu: Any) -> None:
    real = torch.set_default_device

    def set_default_device(device: Any) -> None:
        real(on_cpu(device))

    torch.set_default_device = set_default_device
    any_torch: Any = torch
    any_torch.compile = lambda model=None, **_: model if model is not None else (lambda one: one)
    any_module: Any = nn.Module
    any_module.compile = lambda self, *_, **__: None
    # It refuses the CPU. Here each rank takes its own statistics: the judges look at none of them.
    any_nn: Any = nn
    any_nn.SyncBatchNorm.forward = nn.modules.batchnorm._BatchNorm.forward
    any_nn.parallel.DistributedDataParallel._passing_sync_batchnorm_handle = lambda *_: None
