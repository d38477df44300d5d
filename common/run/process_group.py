"""Start and stop the process group; pick this rank's device and backend."""

import atexit
import collections
import contextlib
import ipaddress
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from common import UserError, precision, private_api, ranks, seal
from common.run.process import Process, World

# Ranks may reach a collective minutes apart (a cold disk, a compile); a rank that takes longer is assumed dead.
TIMEOUT_S = 600
# After a limit of `watch`, whose finding must come before NCCL's own watchdog ends the process without one.
MARGIN_S = 60
MOST_TIMEOUT_S = 1e8  # three years: a timedelta, and C++ in nanoseconds, have an end
ADVICE_S = 60.0  # NCCL makes its connections in its first collective, in seconds at most
FINDING = "watch/finding"  # in the store: which rank is to blame, once that is known
SAVING = "checkpoint"  # name of the process group that writes checkpoints beside the training
# Where NCCL works on some machines only, it is mostly one of these ways between GPUs.
NCCL_ADVICE = (
    "if it never ends, NCCL cannot send: start with NCCL_DEBUG=INFO to see which way it tries, and without that way: "
    "NCCL_P2P_DISABLE=1 (GPU to GPU in a machine), NCCL_IB_DISABLE=1 (InfiniBand), NCCL_SOCKET_IFNAME (interface)\n"
)


def start(backend: str = "auto", dtype: str = "auto", process: Process | None = None) -> World:
    """Pick this rank's device, join the process group, and check that the ranks' devices fit (all ranks).

    Without a launcher, this process is a group of one, so that a recipe makes the same calls everywhere.

    Args:
        backend: auto (NCCL on GPUs, gloo on CPU), gloo or nccl.
        dtype: the type to compute in, see `precision.compute_dtype`; "auto" must mean the same on all ranks.
        process: this one, which a main that `exits.entry` decorates gets.

    Raises:
        UserError: the backend or a GPU is missing, there are more processes than GPUs, or the ranks differ.
    """
    process = process or Process()
    atexit.register(process.background.close)
    local_size = ranks.env_int("LOCAL_WORLD_SIZE", default=1)
    device = _pick_device(ranks.env_int("LOCAL_RANK", default=0), local_size)
    backend = _pick_backend(backend, device)
    picked = {"--dtype": str(precision.compute_dtype(dtype, device)).removeprefix("torch."), "--backend": backend}
    if ranks.env_int("TORCHELASTIC_RESTART_COUNT", default=0) and _launcher_hosts_store():
        raise UserError(
            "torchrun has restarted the ranks with the store of the dead ones, so new ranks may wait for dead ones: "
            "use launch/torchrun.sh, or set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )
    process.met = process.met or (*_rendezvous(), os.environ.pop("RUN_KEY", ""))
    met, rank, size, run_key = process.met
    # Without the values that an earlier start has left there.
    store = dist.PrefixStore(f"start {process.starts}", met) if process.starts else met
    _check_only_gpu(store, rank, size, local_size, device)
    dist.set_debug_level(dist.DebugLevel.INFO)  # torch's errors then name parameters, such as one without a gradient
    device_id = device if backend == "cpu:gloo,cuda:nccl" else None  # else collectives have to guess this rank's device
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size, device_id=device_id)
    # A key of this start, so that nothing of an earlier one counts. The launcher hands down RUN_KEY. Without it, only
    # those who come to the store after the ranks have joined do not know this key.
    start_key = seal.derive(run_key, ranks.from_rank0(lambda: secrets.token_hex(16)))
    sealed = seal.SealedStore(store, start_key)
    process.background.enter_context(private_api.sealed_objects(start_key))
    world = World(rank, size, local_size, socket.gethostname(), device, backend, sealed, process)
    process.world = world
    # First, because ranks with another backend would wait in `_check_devices` and the barrier for ever.
    ranks.check_same(picked=picked)
    if device.type == "cuda" and backend == "gloo" and size > 1:
        ranks.print0(
            "note: --backend gloo takes what GPUs send through the memory of the CPU, which is slow, and torch "
            "promises only all-reduce and broadcast of it: a recipe that sends otherwise needs --backend nccl"
        )
    with _advise(device):
        _check_devices(world)
        dist.barrier()  # all ranks have joined: from here on, a refusal of one cannot keep another from joining
    return world


def _rendezvous() -> tuple[dist.Store, int, int]:
    """The store in which the ranks meet, this rank and the number of ranks."""
    timeout = timedelta(seconds=TIMEOUT_S)
    if "RANK" in os.environ:
        rank = ranks.rank()
        size = ranks.size()
        address, port = _meeting_place(rank, size)
        hosts = rank == 0 and not _launcher_hosts_store()
        listening = _listen(address, port) if hosts else None
        # multi_tenant: a process that joins again at the same port, as tests do, shares the server that it has.
        store = dist.TCPStore(address, port, size, hosts, timeout, multi_tenant=True, master_listen_fd=listening)
        return store, rank, size
    num_tasks = max(ranks.size(), ranks.env_int("SLURM_STEP_NUM_TASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", default=1))
    if num_tasks > 1:
        raise UserError(
            f"srun or mpirun started {num_tasks} processes without torchrun, and each would train alone. Use "
            "launch/slurm.sh; to train alone on purpose, unset SLURM_STEP_NUM_TASKS, PMI_SIZE, OMPI_COMM_WORLD_SIZE"
        )
    return dist.HashStore(), 0, 1


def _launcher_hosts_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _meeting_place(rank: int, size: int) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT, checked: torch would wait for minutes, without a word."""
    if not 0 <= rank < size:
        raise UserError(f"RANK={rank} and WORLD_SIZE={size} in the environment do not fit: ranks count from 0")
    address = os.environ.get("MASTER_ADDR", "")
    port = ranks.env_int("MASTER_PORT", default=0)
    if not 0 < port < 65536:
        raise UserError(f"MASTER_PORT={port} in the environment must be a port, from 1 to 65535")
    try:
        socket.getaddrinfo(address or "-", port)
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR={address} does not resolve on {socket.gethostname()} ({error.strerror}): set it to an "
            "address of rank 0's machine; torchrun takes that as --local-addr"
        ) from error
    return address, port


def _listen(address: str, port: int) -> int | None:
    """Listen at this address alone, where torch would listen on every network interface; the descriptor, for torch.

    None where that may cut off a rank: other machines may resolve rank 0's name to another address than rank 0 itself.
    """
    with contextlib.suppress(ValueError, OSError):
        place = ipaddress.ip_address("127.0.0.1" if address == "localhost" else address)
        family = socket.AF_INET6 if place.version == 6 else socket.AF_INET
        return socket.create_server((str(place), port), family=family).detach()
    return None


def _pick_device(local_rank: int, local_size: int) -> torch.device:
    if not torch.cuda.is_available():
        given = ranks.env_int("SLURM_GPUS_ON_NODE", "GPUS_ON_NODE", default=0)  # set by Slurm, or by launch/torchrun.sh
        if given and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
            raise UserError(
                f"{socket.gethostname()} has {given} GPU{'s' * (given > 1)} for this job, but torch sees none: "
                "check the driver and whether torch is a CUDA build, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
            )
        if other := torch.accelerator.current_accelerator(check_available=True):
            ranks.print0(f"note: no recipe uses the accelerator of this machine ({other.type}): training on the CPU")
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if 1 < gpus < local_size:
        raise _too_few(gpus, local_size)
    # A process that sees one GPU may see one of its own, as in a container for each process; `_check_only_gpu` looks.
    device = torch.device("cuda", local_rank if gpus > 1 else 0)
    torch.cuda.set_device(device)
    return device


def _too_few(gpus: int, local_size: int) -> UserError:
    return UserError(
        f"{local_size} processes were started on {socket.gethostname()}, which has {gpus} "
        f"GPU{'s' * (gpus > 1)}, and each process needs its own: set NPROC_PER_NODE={gpus} "
        "(torchrun: --nproc-per-node), or CUDA_VISIBLE_DEVICES= to train on the CPU"
    )


def _check_only_gpu(store: dist.Store, rank: int, size: int, local_size: int, device: torch.device) -> None:
    """Check that the processes of a machine that see one GPU each do not see the same one, before NCCL fails at it."""
    sees = torch.cuda.device_count() if device.type == "cuda" else 0
    mine = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}" if sees else "none"
    store.set(f"gpu/{rank}", mine)
    if sees == 1 < local_size:
        everyone = store.multi_get([f"gpu/{other}" for other in range(size)])
        if everyone.count(mine.encode()) > 1:
            raise _too_few(1, local_size)


def _pick_backend(backend: str, device: torch.device) -> str:
    if backend not in ("auto", "gloo", "nccl"):
        raise UserError(f"--backend {backend} is unknown: use auto, gloo or nccl")
    if backend != "auto" and not dist.is_backend_available(backend):
        raise UserError(f"--backend {backend}: torch {torch.__version__} was built without it")
    if backend == "nccl" and device.type != "cuda":
        raise UserError("--backend nccl needs GPUs, and torch sees none on this machine: use --backend gloo")
    # gloo beside NCCL carries data that is on the CPU: names, digests, plans of checkpoints.
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and backend != "gloo" else "gloo"


@contextlib.contextmanager
def _advise(device: torch.device) -> Iterator[None]:
    """Say what may be wrong if the GPUs' first collective does not end: nobody watches yet."""
    text = f"note: the first collective of the GPUs has taken {ADVICE_S:g} s so far; {NCCL_ADVICE.strip()}"
    timer = threading.Timer(ADVICE_S, ranks.print0, [text])
    timer.daemon = True
    if device.type == "cuda":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _check_devices(world: World) -> None:
    """Check that every rank has a device of its own, and note devices of several kinds (all ranks take part)."""
    if world.device.type != "cuda":
        return
    properties = torch.cuda.get_device_properties(world.device)
    mine = [world.host, str(properties.uuid), properties.name]
    everyone = ranks.gather(mine)
    shared = [r for r, device in enumerate(everyone) if device == mine]
    if len(shared) > 1:
        raise UserError(f"ranks {shared} share one GPU of {world.host}: check LOCAL_RANK and CUDA_VISIBLE_DEVICES")
    kinds = collections.Counter(name for _, _, name in everyone)
    if len(kinds) > 1:
        found = ", ".join(f"{number} x {name}" for name, number in kinds.items())
        ranks.print0(f"note: the GPUs differ ({found}): the slowest sets the pace, and last digits depend on them")


def set_timeout(mesh: DeviceMesh, hang_timeout_s: float) -> None:
    """Give the collectives of the training more time than `watch` gives a rank (all ranks).

    The groups of a mesh's axes begin with torch's own timeout of 10 or 30 minutes. `watch` gives a rank that moves
    twice its time.
    """
    timeout = timedelta(seconds=min(max(2 * hang_timeout_s, TIMEOUT_S) + MARGIN_S, MOST_TIMEOUT_S))
    for group in (None, *mesh.get_all_groups()):
        private_api.set_timeout(timeout, group)


def finish(process: Process, begins_again: bool = False) -> None:
    """End the process group once every rank has finished (all ranks). Not for error paths: it can block.

    Args:
        process: this one.
        begins_again: it will `start` once more, and meet the others in the same store.
    """
    dist.barrier()
    process.background.close()
    dist.destroy_process_group()
    process.world = None
    process.watch = None
    if begins_again:
        process.starts += 1
        private_api.forget_meshes()
