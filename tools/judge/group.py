"""Seams of torch.distributed: the group, its collectives, and what wraps a model."""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh, distributed_c10d, fsdp
from torch.distributed.tensor import parallel

from tools.judge.record import fingerprint, first_tensor, num

MOST_COMPARED = 50  # gradients of a flat copy
COLLECTIVES = (
    "all_reduce broadcast reduce all_gather all_gather_into_tensor all_gather_object gather scatter reduce_scatter "
    "reduce_scatter_tensor all_to_all all_to_all_single barrier broadcast_object_list gather_object "
    "scatter_object_list all_reduce_coalesced monitored_barrier"
)


def is_open() -> bool:
    """Whether the script has a process group."""
    return dist.is_initialized()


def install(record: Any, place: Any) -> None:
    """Patch them."""
    _init(record, place)
    for name in COLLECTIVES.split():
        if hasattr(dist, name):
            both(name, _collective(record, name, getattr(dist, name)))
    _meshes(place)
    _wrappers(record, place)


def both(name: str, function: Any) -> None:
    """Exchange a function of torch.distributed wherever it is looked up."""
    for module in (dist, distributed_c10d, device_mesh):
        if hasattr(module, name):
            setattr(module, name, function)


def _init(record: Any, place: Any) -> None:
    real, new_group, destroy = dist.init_process_group, dist.new_group, dist.destroy_process_group

    @functools.wraps(real)
    def init(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        given = {name: int(kwargs[name]) for name in ("rank", "world_size") if kwargs.get(name) is not None}
        given = {name: value for name, value in given.items() if value >= 0}
        record.log("init", backend=str(backend), given=given, rank=place.rank, size=place.size)
        if "rank" in given:
            kwargs["rank"] = place.rank
        if "world_size" in given:
            kwargs["world_size"] = place.size
        if "nccl" in str(backend) or backend is None or backend == "cpu:gloo,cuda:nccl":
            backend = "gloo"
        kwargs.pop("device_id", None)
        os.environ.update(place.environment())  # a script may have put a port of its own there
        method = kwargs.get("init_method") or (args[0] if args else None)
        if isinstance(method, str) and not method.startswith("env"):  # a port that other runs also use
            args, kwargs["init_method"] = (), "env://"
            for name in ("rank", "world_size"):
                kwargs.pop(name, None)
        record.busy.on = True
        try:
            real(backend, *args, **kwargs)
        finally:
            record.busy.on = False

    @functools.wraps(new_group)
    def group(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        if "nccl" in str(kwargs.get("backend")):
            kwargs["backend"] = "gloo"
        return new_group(*args, **kwargs)

    @functools.wraps(destroy)
    def ended(*args: Any, **kwargs: Any) -> None:
        record.log("destroy")
        destroy(*args, **kwargs)

    both("init_process_group", init)
    both("new_group", group)
    both("destroy_process_group", ended)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _collective(record: Any, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """One collective: what goes in, and what comes out; its begin is written before it waits."""

    @functools.wraps(real)
    def patched(*args: Any, **kwargs: Any) -> Any:
        if getattr(record.busy, "alone", False):
            raise RuntimeError(f"{name} in forward, and rank 0 computes it alone here")
        if getattr(record.busy, "on", False) or not record.where():
            return _run(name, real, args, kwargs)
        tensor = first_tensor([*args, *kwargs.values()])
        before = num(tensor)
        grads = _grad_names(record, tensor)
        own = pieces(record, tensor, grads)
        raw = bool(own) and bool(record.local) and all(fingerprint([one]) in record.local for one in own)
        grads = grads or int(raw)
        record.log(
            "collective",
            name=name,
            direct=record.direct(),
            shape=list(tensor.shape) if tensor is not None else [],
            value=before,
            grads=grads,
            op=_op(args, kwargs),
            weights=_is_weight(record, tensor),
            statistics=_is_statistic(record, tensor),
        )
        record.busy.on = True
        try:
            result = _run(name, real, args, kwargs)
        finally:
            record.busy.on = False
        if raw and name == "all_reduce" and _op(args, kwargs) == "SUM" and not kwargs.get("async_op"):
            record.sums |= {fingerprint([one]) for one in own}
        record.log("collected", name=name, value=num(tensor))
        return result

    return patched


def _op(args: Any, kwargs: Any) -> str:
    found = [one for one in (*args, *kwargs.values()) if isinstance(one, dist.ReduceOp | dist.ReduceOp.RedOpType)]
    return str(found[0]).rpartition(".")[2] if found else "SUM"


def _run(name: str, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call it; gloo has no mean, so that is a sum and a division."""
    if _op(args, kwargs) != "AVG" or name not in ("all_reduce", "reduce_scatter_tensor"):
        return real(*args, **kwargs)
    args = tuple(dist.ReduceOp.SUM if _op((one,), {}) == "AVG" else one for one in args)
    kwargs = {key: dist.ReduceOp.SUM if key == "op" else one for key, one in kwargs.items()}
    asked, kwargs["async_op"] = kwargs.get("async_op", False), False
    real(*args, **kwargs)
    args[0].div_(dist.get_world_size(kwargs.get("group")))
    return _Done() if asked else None


class _Done:
    """The handle of a collective that is over."""

    def wait(self, *_: Any) -> bool:
        """As torch's own."""
        return True

    def is_completed(self) -> bool:
        """As torch's own."""
        return True


def _is_weight(record: Any, tensor: Any) -> bool:
    return tensor is not None and any(
        tensor is one or (tensor.data_ptr() == one.data_ptr() and tensor.numel() == one.numel())
        for optimizer in record.optimizers
        for group in optimizer.param_groups
        for one in group["params"]
    )


def _is_statistic(record: Any, tensor: Any) -> bool:
    """Whether a tensor is a buffer of a model, or as long as a flat copy of all of one kind of number."""
    if tensor is None:
        return False
    for module in record.modules.values():
        held = [one for one in module.buffers() if one.dtype == tensor.dtype]
        if any(one.data_ptr() == tensor.data_ptr() for one in held) or tensor.numel() == sum(map(torch.numel, held)):
            return bool(held)
    return False


def _grad_names(record: Any, tensor: Any) -> int:
    """How many gradients a tensor is: 1 for one gradient, more for a flat copy of several."""
    if tensor is None or not tensor.is_floating_point():
        return 0
    grads = [p.grad for one in record.optimizers for group in one.param_groups for p in group["params"]]
    grads = [one for one in grads if one is not None]
    if any(one.data_ptr() == tensor.data_ptr() and one.numel() for one in grads):
        return 1
    total = sum(one.numel() for one in grads)
    return len(grads) if total and tensor.numel() == total and tensor.ndim == 1 else 0


def pieces(record: Any, tensor: Any, grads: int) -> list[torch.Tensor]:
    """A tensor, or the first gradients of a flat copy of all."""
    if tensor is None or grads < 2:
        return [] if tensor is None else [tensor]
    held = [p.grad for one in record.optimizers for group in one.param_groups for p in group["params"]]
    sizes = [one.numel() for one in held if one is not None]
    return list(tensor.split(sizes))[:MOST_COMPARED]


def _meshes(place: Any) -> None:
    real = device_mesh.init_device_mesh

    @functools.wraps(real)
    def mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        if place.gpu and device_type == "cuda" and not torch.cuda.current_device():
            torch.cuda.set_device(place.rank % place.per_machine)  # as torch does where the script has not
        return real("cpu" if place.gpu else device_type, *args, **kwargs)

    both("init_device_mesh", mesh)
    device_mesh.init_device_mesh = mesh


def _wrappers(record: Any, place: Any) -> None:
    ddp: Any = nn.parallel.DistributedDataParallel
    init = ddp.__init__

    @functools.wraps(init)
    def wrapped(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        args = ()
        for name in ("device_ids", "output_device"):
            kwargs.pop(name, None)
        kinds = [type(one).__name__ for one in module.modules()]
        record.log(
            "wrap",
            kind="DDP",
            module=id(module),
            start=fingerprint(module.parameters()),
            batch_norms=sum("BatchNorm" in one for one in kinds),
            sync=kinds.count("SyncBatchNorm"),
            optimizers=len(record.optimizers),
            unused=bool(kwargs.get("find_unused_parameters")),
            statistics=bool(kwargs.get("broadcast_buffers", True)),
        )
        record.busy.on = True
        try:
            init(self, module, *args, **kwargs)
        finally:
            record.busy.on = False
        record.inner[id(module)] = self

    ddp.__init__ = wrapped
    shard = fsdp.fully_shard

    @functools.wraps(shard)
    def sharded(module: Any, *args: Any, **kwargs: Any) -> Any:
        record.log("wrap", kind="fully_shard", module=id(module), optimizers=len(record.optimizers))
        return shard(module, *args, **kwargs)

    fsdp.fully_shard = sharded
    _first_fsdp(record)
    split = parallel.parallelize_module

    @functools.wraps(split)
    def parallelized(*args: Any, **kwargs: Any) -> Any:
        record.log("wrap", kind="tensor parallel")
        return split(*args, **kwargs)

    parallel.parallelize_module = parallelized
    _threads(record)


def _first_fsdp(record: Any) -> None:
    """FSDP as a wrapper: on the CPU, without what only GPUs have."""
    wrapper: Any = fsdp.FullyShardedDataParallel
    init = wrapper.__init__

    @functools.wraps(init)
    def wrapped(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        kwargs["device_id"] = torch.device("cpu")
        record.flat = True
        inner = getattr(record.busy, "on", False)
        if not inner:
            record.log("wrap", kind="fully_shard", module=id(module), optimizers=len(record.optimizers))
        record.busy.on = True
        available, torch.cuda.is_available = torch.cuda.is_available, lambda: False
        try:
            init(self, module, *args, **kwargs)
        finally:
            record.busy.on, torch.cuda.is_available = inner, available

    wrapper.__init__ = wrapped


def _threads(record: Any) -> None:
    replicas: Any = nn.DataParallel
    replicas_init = replicas.__init__

    @functools.wraps(replicas_init)
    def threads(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        record.log("wrap", kind="DataParallel", module=id(module))
        available, torch.cuda.is_available = torch.cuda.is_available, lambda: False
        try:
            replicas_init(self, module)
        finally:
            torch.cuda.is_available = available

    replicas.__init__ = threads
