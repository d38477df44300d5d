"""Private parts of torch that a run calls: all of them are here, each with its reason.

Any release may rename them. tests/test_private_api.py calls each one for real, and CI runs it on the oldest versions
that pyproject.toml allows and on the newest that were tested. Checked on CPU with gloo, torch 2.11.0 and 2.15.0. NCCL:
not run. Those that only a workload calls are in common/workloads/private_api.py.
"""

import contextlib
import functools
import json
import pickle
import types
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from common import ranks, seal

# (phase, file, function): torch's functions on a thread's stack in each phase; "" is any function of the file. The
# first entry that is found counts: a collective in a backward pass is a collective.
FRAMES = (
    ("collective", "torch/distributed/distributed_c10d.py", ""),
    ("optimizer", "torch/optim/", ""),
    ("backward", "torch/_tensor.py", "backward"),
    ("backward", "torch/autograd/__init__.py", ""),
    ("backward", "torch/distributed/pipelining/_backward.py", ""),
    ("forward", "torch/nn/modules/module.py", "_wrapped_call_impl"),
)
# Functions that wait for another rank's message, which gloo's flight recorder does not show.
MESSAGES = ("_wait_batch_p2p", "recv", "send")


def flight_recorder(device: torch.device, only_active: bool) -> dict[str, Any]:
    """This rank's collectives, as torch has recorded them: {"entries": [...], ...}, or {} if torch does not tell.

    Needs `torch._C._distributed_c10d._dump_fr_trace_json`, and for NCCL also `_dump_nccl_trace_json`. Public is only
    TORCH_FR_DUMP_TEMP_FILE, a file that NCCL's watchdog writes after a timeout; a hang must be explained before that.
    torch 2.15 has a recorder for each backend, which a third argument chooses; 2.11 has one for gloo, one for NCCL.
    """
    c10d = torch._C._distributed_c10d
    dump: Any = getattr(c10d, "_dump_fr_trace_json", None)
    if dump is None:
        _warn_once(f"torch {torch.__version__} has no _dump_fr_trace_json: a hang is named without its collective")
        return {}
    texts = [dump(True, only_active)]
    if device.type == "cuda":
        with contextlib.suppress(TypeError):  # one recorder for all backends
            texts += [dump(True, only_active, backend) for backend in ("nccl", "nccl2")]
        older: Any = getattr(c10d, "_dump_nccl_trace_json", None)
        texts += [older(True, only_active)] if older else []
    records = [json.loads(text) for text in texts]
    return records[0] | {"entries": [entry for record in records for entry in record.get("entries", [])]}


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None) -> None:
    """Give the later collectives of a group (None: of all ranks) this much time.

    Needs `distributed_c10d._set_pg_timeout` where torch has no public `set_timeout` yet, as 2.11.
    """
    change: Any = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    change(timeout, group)


@functools.cache
def _warn_once(text: str) -> None:
    ranks.print0(f"warning: {text}")


def skip_update_if(optimizer: torch.optim.Optimizer, bad: torch.Tensor) -> None:
    """Make the next step of a fused optimizer change nothing if `bad`, (), is not 0, without waiting for the device.

    Needs the attribute `found_inf`, which `torch.amp.GradScaler` sets on fused optimizers for the same purpose.
    GradScaler, the public way, also scales the loss and divides the gradients.
    """
    optimizer.found_inf = bad.float()  # type: ignore[attr-defined]


def copy_each(to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy each tensor's values into another: on a GPU, many in one kernel.

    Needs `torch._foreach_copy_`, which torch's optimizers and FSDP call. The public way is a call for each tensor.
    """
    torch._foreach_copy_(to, values)


def keep_compiled_activations() -> None:
    """Let a compiled graph run its backward pass in two parts, as zero-bubble schedules do (the whole process).

    Needs `torch._functorch.config.donated_buffer`: with it, the first part frees memory that the second reads.
    torch.compile has no public option for it.
    """
    import torch._functorch.config as functorch

    functorch.donated_buffer = False


def merge_axes(mesh: DeviceMesh) -> None:
    """Let DTensor reduce over all axes of a mesh in one collective instead of one for each axis (all ranks).

    Needs `DeviceMesh._flatten`. DTensor's own warning asks for it ("flatten mesh dimensions"), and no public function
    does it. Without it, training takes more collectives and gives the same numbers up to rounding.
    """
    flatten: Any = getattr(mesh, "_flatten", None)
    if flatten and mesh.ndim > 1:
        flatten("_".join(mesh.mesh_dim_names or ()))


def forget_meshes() -> None:
    """Let DTensor forget the layouts that it has met, with their meshes, before these processes begin again.

    Needs `torch.distributed.tensor.debug._clear_sharding_prop_cache`: results would have a mesh of before, whose groups
    have been destroyed. No public function does it.
    """
    from torch.distributed.tensor import debug

    getattr(debug, "_clear_sharding_prop_cache", lambda: None)()


@contextlib.contextmanager
def sealed_objects(key: bytes) -> Iterator[None]:
    """Let torch's collectives of objects load only pickles that a rank with this key has sent (the whole process).

    `torch.distributed.checkpoint` and Accelerate send such. Needs `distributed_c10d._pickler` and `_unpickler`; torch
    2.15's public `weights_only=True` is an argument of each call, and checkpoints do not pass it.
    """
    c10d: Any = dist.distributed_c10d
    before = (getattr(c10d, "_pickler", None), getattr(c10d, "_unpickler", None))
    if None in before:
        _warn_once(f"torch {torch.__version__} has no _unpickler to replace: ranks load each other's pickles unseen")
        yield
        return

    def dump(file: Any, value: Any) -> None:
        file.write(seal.close(key, "object", pickle.dumps(value)))

    def load(file: Any) -> Any:
        content = seal.unseal(key, "object", file.read())
        if content is None:
            raise RuntimeError("an object came that no rank of this run has sent: it is not loaded")
        return pickle.loads(content)  # noqa: S301 (sealed)

    c10d._pickler = lambda file: types.SimpleNamespace(dump=functools.partial(dump, file))
    c10d._unpickler = lambda file: types.SimpleNamespace(load=functools.partial(load, file))
    try:
        yield
    finally:
        c10d._pickler, c10d._unpickler = before
