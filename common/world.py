"""Who am I: rank, device, process group. The only reader of RANK and its friends."""

import atexit
import contextlib
import hashlib
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from common import UserError

# Ranks may reach a collective minutes apart (a cold disk, a compile); longer than this is a rank that will not come.
TIMEOUT_S = 600
Answer = TypeVar("Answer")
# What runs beside the training. It ends in time: a thread in C++ aborts an interpreter that is shutting down.
background = contextlib.ExitStack()
atexit.register(background.close)


def _env(*names: str, default: int) -> int:
    return int(next((os.environ[name] for name in names if name in os.environ), default))


def rank() -> int:
    """Rank of this process, known before there is a process group."""
    return _env("RANK", "OMPI_COMM_WORLD_RANK", default=0)


def size() -> int:
    """Number of processes of this run, known before there is a process group."""
    return _env("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", default=1)


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    device: torch.device
    backend: str

    def __str__(self) -> str:
        """One line for the terminal: what runs where."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        hosts = _env("GROUP_WORLD_SIZE", default=max(1, self.size // self.local_size))
        where = self.host if hosts == 1 else f"{hosts} hosts, the first {self.host}"
        threads = f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)} each"
        what = f"{name}, {self.backend}, {threads}, torch {torch.__version__}"
        return f"{self.size} process{'es' * (self.size > 1)} on {where}: {what}"


def start(backend: str = "auto", **same: Mapping[str, Any]) -> World:
    """Pick this rank's device, join the process group, and check that the ranks can train together (all ranks).

    A process that no launcher started is a group of one, so that a recipe makes the same calls everywhere.

    Args:
        backend: auto is NCCL on GPUs and gloo on CPU; or gloo, nccl, mpi by name.
        **same: see `check_same`.

    Raises:
        UserError: the backend or a GPU is not there, there are more processes than GPUs, or the ranks differ.
    """
    local_rank = _env("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", default=0)
    local_size = _env("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", default=1)
    device = _pick_device(local_rank, local_size)
    backend = _pick_backend(backend, device)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and _env("TORCHELASTIC_RESTART_COUNT", default=0):
        raise UserError(
            "torchrun has restarted the ranks with the store of the dead ones, in which they may wait for them: "
            "start it by launch/torchrun.sh, or with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )
    options: dict[str, Any] = {"backend": backend, "timeout": timedelta(seconds=TIMEOUT_S)}
    if backend == "cpu:gloo,cuda:nccl":
        options["device_id"] = device  # names this rank's device once, so no collective has to guess it
    if backend != "mpi" and "RANK" not in os.environ:
        if (num := max(size(), _env("SLURM_STEP_NUM_TASKS", "PMI_SIZE", default=1))) > 1:  # each would train apart
            raise UserError(f"{num} ranks, no torchrun: launch/slurm.sh, --backend mpi, or unset SLURM_STEP_NUM_TASKS")
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.set_debug_level(dist.DebugLevel.INFO)  # torch's errors name parameters, such as one without a gradient
    dist.init_process_group(**options)
    world = World(dist.get_rank(), dist.get_world_size(), local_rank, local_size, socket.gethostname(), device, backend)
    _check_devices(world)
    dist.barrier()  # all have joined: from here on a refusal of one rank cannot break the joining of another
    check_same(**same)
    return world


def _pick_device(local_rank: int, local_size: int) -> torch.device:
    if not torch.cuda.is_available():
        given = _env("SLURM_GPUS_ON_NODE", "GPUS_ON_NODE", default=0)  # of Slurm, or of launch/torchrun.sh
        if given and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
            raise UserError(
                f"{socket.gethostname()} has {given} GPU{'s' * (given > 1)} for this job, and torch sees none: is the "
                "driver there, and torch built for it? CUDA_VISIBLE_DEVICES= trains on the CPU"
            )
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if local_size > gpus:
        raise UserError(
            f"{local_size} processes were started on {socket.gethostname()}, which has {gpus} "
            f"GPU{'s' * (gpus > 1)}: one process drives one GPU. Set NPROC_PER_NODE={gpus} "
            "(torchrun: --nproc-per-node), or CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _pick_backend(backend: str, device: torch.device) -> str:
    if backend == "auto":
        # gloo beside NCCL carries what lives on the CPU: names, digests, checkpoints' plans.
        return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if backend not in ("gloo", "nccl", "mpi"):
        raise UserError(f"--backend {backend} is not known: auto, gloo, nccl or mpi")
    if not dist.is_backend_available(backend):
        built = [name for name in ("gloo", "nccl", "mpi") if dist.is_backend_available(name)]
        why = "; MPI needs a torch built from source beside an MPI library" if backend == "mpi" else ""
        raise UserError(
            f"--backend {backend}: torch {torch.__version__} was built without it{why}. "
            f"This torch has {', '.join(built)}"
        )
    if backend == "nccl":
        if device.type != "cuda":
            raise UserError("--backend nccl moves data between GPUs, and this machine has none: --backend gloo")
        return "cpu:gloo,cuda:nccl"
    return backend


def _check_devices(world: World) -> None:
    """Every rank sits on a device of its own (all ranks take part)."""
    if world.device.type != "cuda":
        return
    mine = (world.host, str(torch.cuda.get_device_properties(world.device).uuid))
    everyone: list[tuple[str, str]] = [("", "")] * world.size
    dist.all_gather_object(everyone, mine)
    shared = [r for r, device in enumerate(everyone) if device == mine]
    if len(shared) > 1:
        raise UserError(f"ranks {shared} share one GPU of {world.host}: check LOCAL_RANK and CUDA_VISIBLE_DEVICES")


def from_rank0(answer: Callable[[], Answer]) -> Answer:
    """Let rank 0 look or decide, and give every rank its answer, or its refusal (all ranks take part)."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box = [answer()]
        except UserError as error:
            box = [error]
    dist.broadcast_object_list(box)
    if isinstance(box[0], UserError):
        raise box[0]
    return box[0]


def check_same(**groups: Mapping[str, Any]) -> None:
    """Compare small dictionaries over all ranks; ranks that train on different terms must not start.

    Args:
        **groups: this rank's entries, by what they are: picklable, comparable.

    Raises:
        UserError: on all ranks alike; names the first odd rank, the entry and both values.
    """
    mine = {f"{group} {key}": value for group, entries in groups.items() for key, value in entries.items()}
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for other, theirs in enumerate(everyone):
        for key in everyone[0] | theirs:
            if everyone[0].get(key) != theirs.get(key):
                raise UserError(
                    f"rank {other} was started with {key} {theirs.get(key)!r}, rank 0 with {everyone[0].get(key)!r}: "
                    "start every rank with the same flags, code and data"
                )


def code_digests(recipe: str) -> dict[str, str]:
    """SHA-256 of the recipe's file and of each file of common/, to compare between ranks and to keep with a run."""
    common = Path(__file__).parent
    files = {str(path.relative_to(common.parent)): path for path in sorted(common.rglob("*.py"))}
    files |= {"train.py": Path(recipe)}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in files.items()}


def finish() -> None:
    """Leave the process group together, after everyone is done (all ranks). Not for error paths: it can block."""
    dist.barrier()
    background.close()
    dist.destroy_process_group()
