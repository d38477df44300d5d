"""Run recipes in real processes, without paying for `import torch` and for a process's first steps each time.

A fork server imports torch once; every rank is a fork of it with the environment that torchrun would give,
joins a real gloo group over TCP and runs the recipe's file as __main__. A rank that ends its training as it should
is used for the next one (`rerun` says what is put back in between); one that fails is replaced.
tests/launch/test_launch.py covers the real torchrun.
"""

import atexit
import contextlib
import functools
import gc
import json
import multiprocessing
import multiprocessing.util
import os
import re
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

from common import devices
from common.protect import health
from common.run import stop
from common.train import flops, guard, metrics
from launch.ports import free_port
from tools.about import RECIPES, ROOT, choices, has_flag, is_single, source, trainings, workload

TRAINING = trainings()
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.harness.preload"])
SIZES = ("--num-layers", "--mlp-width")  # of the model, that a layout may choose
# Replicas that train apart give other numbers than the rest (tests/recipes/test_diloco.py); as one, they are ddp_gpt.
AS_ONE = ("--replicas", "1", "--outer-lr", "1", "--outer-momentum", "0")
# A model with experts is another one (tests/recipes/test_moe.py); without, it is that of fsdp_gpt.
WITHOUT_EXPERTS = ("--experts", "1")
GRACE_S = 0.5  # torchrun, too, ends the others when one rank has failed
PATIENT_S = 60.0  # a GRACE_S in which every rank ends by itself
# Ends what would never end, and proves nothing: many times what the longest training takes on a busy machine. It is
# below process_group.TIMEOUT_S, so that what only that would end counts as a hang.
HANG_S = 500.0
# Flags of each workload for a model that is quick in float64 on a CPU. tests/harness/short_resnet.py has the first; the
# sizes of the second divide by few numbers of ranks.
SMALL = {
    "resnet": ("--model", "resnet6"),
    "gpt": ("--seq-len", "16", "--num-layers", "3", "--num-heads", "4", "--width", "40", "--mlp-width", "44"),
    "ppo": (
        *("--num-envs", "12", "--rollout-steps", "16", "--global-batch-size", "96", "--width", "8"),
        *("--update-epochs", "2", "--eval-episodes", "3"),
    ),
    "mimo": (
        *("--access-points", "9", "--antennas", "2", "--users", "8", "--pilots", "2"),
        *("--global-batch-size", "12"),
    ),
}


@dataclass(frozen=True)
class Result:
    """How the ranks ended.

    Attributes:
        codes: the exit code of each.
        outputs: what each has printed.
        target: what they ran, each with its own of `args`.
        args: for each rank.
    """

    codes: list[int]
    outputs: list[str]
    target: Callable[..., None] | None = field(default=None, repr=False)
    args: Sequence[tuple[Any, ...]] = field(default=(), repr=False)

    @property
    def ok(self) -> bool:
        return not any(self.codes)

    def __str__(self) -> str:
        return "\n".join(
            f"[rank {i}: {code}]\n{text}" for i, (code, text) in enumerate(zip(self.codes, self.outputs, strict=True))
        )


SUPERVISED = [recipe for recipe in RECIPES if has_flag(recipe, "--data")]  # which train on a set of samples


def world_sizes(recipe: str, most: int = 4) -> list[int]:
    """World sizes that a recipe runs on: one process only, if its launch.env says so."""
    return [1] if is_single(recipe) else list(range(1, most + 1))


@dataclass(frozen=True)
class Layout:
    """One way to run a recipe: on how many ranks, and how it deals the model out over them.

    Attributes:
        recipe: whose train.py.
        size: number of ranks.
        flags: those of its strategy.
        dp_size: ranks, or groups of them, that read different samples.
    """

    recipe: str
    size: int
    flags: tuple[str, ...]
    dp_size: int

    def __str__(self) -> str:
        return "-".join([self.recipe, str(self.size), *(flag.lstrip("-") for flag in self.flags)])

    @property
    def strategy(self) -> tuple[str, ...]:
        """Its flags without those that choose the size of the model."""
        pairs = zip(self.flags[::2], self.flags[1::2], strict=True)
        return tuple(part for pair in pairs if pair[0] not in SIZES for part in pair)

    @property
    def with_experts(self) -> tuple[str, ...]:
        """Its strategy, of a model that may have experts: what is compared with itself can have them."""
        pairs = zip(self.strategy[::2], self.strategy[1::2], strict=True)
        return tuple(part for pair in pairs if pair != WITHOUT_EXPERTS for part in pair)

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """What is not as in `small`."""
        pairs = zip(self.flags[::2], self.flags[1::2], strict=True)
        return tuple((flag[2:].replace("-", "_"), int(size)) for flag, size in pairs if flag in SIZES)

    def micro_batches(self, samples: int) -> tuple[str, ...]:
        """The flag for micro-batches of this many samples over all ranks, where a batch can be cut into some.

        A pipeline's are smaller: it runs several of them beside each other, in several rounds where there are enough.
        """
        if self.recipe not in SUPERVISED or "--micro-batch-size" in self.flags:
            return ()
        part = samples // self.dp_size
        if "--pp" in self.flags:
            pp = self.size // self.dp_size
            # Interleaved schedules need a multiple of pp, DualPipeV as many as there are stages: 2 pp of a whole step.
            for multiple in (2 * pp, pp):
                numbers = [n for n in range(multiple, part, multiple) if part % n == 0]
                if numbers:
                    return ("--micro-batch-size", str(part // max(numbers)))
            return ("--micro-batch-size", "1")
        return ("--micro-batch-size", str(part))


def layouts(recipe: str) -> list[Layout]:
    """Every way that a recipe deals a model out over one to four ranks, as far as its flags tell."""
    found = []
    for size in world_sizes(recipe):
        if has_flag(recipe, "--pp"):
            schedules = [("--schedule", name) for name in choices(recipe, "--schedule")]
            schedules.append(
                ("--schedule", "GPipe", "--micro-batch-size", "0")
            )  # naive: each stage waits for all others
            pipelines = [pp for pp in (4, 3, 2, 1) if size % pp == 0 and pp * 2 >= size]
            depth = {1: "3", 2: "5", 3: "7", 4: "9"}  # two stages a rank, of unequal numbers of layers
            found += [
                Layout(recipe, size, ("--pp", str(pp), *how, "--num-layers", depth[pp]), size // pp)
                for pp in pipelines
                for how in (schedules if pp > 1 else schedules[:1])
            ]
        elif has_flag(recipe, "--tp"):
            slices = [tp for tp in (4, 2, 1) if size % tp == 0][:2]
            found += [Layout(recipe, size, ("--tp", str(tp)), size // tp) for tp in slices if tp > 1 or size % 2]
        elif has_flag(recipe, "--cp"):
            groups = [cp for cp in (4, 2, 1) if size % cp == 0][:2]  # of three: test_context.py
            kinds = choices(recipe, "--cp-kind")
            found += [
                Layout(recipe, size, ("--cp", str(cp), "--cp-kind", kind), size // cp)
                for cp in groups
                for kind in (kinds if cp > 1 else kinds[:1])
                if cp > 1 or size % 2
            ]
        elif has_flag(recipe, "--sync"):  # in several buckets, small as the model is
            kinds = choices(recipe, "--sync") if size > 1 else choices(recipe, "--sync")[:1]
            found += [Layout(recipe, size, ("--sync", kind, "--bucket-mb", "0.02"), size) for kind in kinds]
        else:
            odd = ("--mlp-width", "45") if has_flag(recipe, "--dp-replicate") else ()  # parts of unequal size
            odd += WITHOUT_EXPERTS if has_flag(recipe, "--experts") else ()
            found.append(Layout(recipe, size, AS_ONE if has_flag(recipe, "--inner-steps") else odd, size))
            if has_flag(recipe, "--dp-replicate") and size == 4:
                found.append(Layout(recipe, size, ("--dp-replicate", "2", *odd), size))
    return found


def schedules_once(found: Iterable[Layout]) -> list[Layout]:
    """Without pipelines that repeat a schedule: all are in two pipelines of two stages, one is in every other number.

    tests/recipes/test_equivalence.py has every schedule in all of them.
    """
    usual = choices("pipeline_gpt", "--schedule")[0]
    return [
        one
        for one in found
        if "--schedule" not in one.flags or one.flags[3:4] == (usual,) or (one.size, one.dp_size) == (4, 2)
    ]


def layout(recipe: str, size: int) -> Layout:
    """The first way to run a recipe on this many ranks, or on the most that it can."""
    size = min(size, world_sizes(recipe)[-1])
    return next(layout for layout in layouts(recipe) if layout.size == size)


def curve(recipe: str) -> str:
    """The tag of what every step records, and that faults must not change."""
    return "train/loss" if recipe in TRAINING else "se/l4_mmse"


def base(recipe: str) -> str:
    """The recipe that it builds on, or ""."""
    found = re.search(r"^Base: recipes/(\w+)\.", source(recipe), re.MULTILINE)
    return found[1] if found else ""


def follows(recipe: str) -> bool:
    """Whether it builds on another one of its workload: where one of them stands for all, or comes first, not it."""
    return workload(base(recipe)) == workload(recipe)


def ends() -> list[str]:
    """Recipes of several ranks and a data set that no other one builds on: they send what their bases do, and more."""
    bases = set(map(base, RECIPES))
    return [recipe for recipe in SUPERVISED if recipe not in bases and world_sizes(recipe)[-1] > 1]


def small(recipe: str) -> tuple[str, ...]:
    """Flags for a small model of a recipe's workload."""
    return SMALL.get(workload(recipe), ())


def stands_for_workload(recipe: str) -> bool:
    """Whether it is the first recipe of its workload that runs on several ranks."""
    several = world_sizes(recipe)[-1] > 1
    return several and not (follows(recipe) and world_sizes(base(recipe))[-1] > 1)


def run_recipe(
    recipe: str | Path,
    world_size: int,
    *flags: str,
    rank_flags: Mapping[int, Sequence[str]] | None = None,
    timeout_s: float = HANG_S,
    target: Callable[[str, list[str]], None] | None = None,
) -> Result:
    """Run a recipe (by name, or the path of a train.py) on real ranks.

    `rank_flags` go to single ranks; `target` is what runs the file there, by default `run_unmeasured`.
    """
    path = recipe if isinstance(recipe, Path) else ROOT / "recipes" / recipe / "train.py"
    argv = [[str(path), *flags, *(rank_flags or {}).get(rank, ())] for rank in range(world_size)]
    return rerun(target or run_unmeasured, [(str(path), one) for one in argv], timeout_s)


class _Rank:
    """A process that runs one job after the other, each with torchrun's environment."""

    def __init__(self) -> None:
        self.connection, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_serve, args=(theirs,))
        self.process.start()
        theirs.close()
        self.busy = False
        self.ended = False  # by itself, and nothing is left in it that the next job would notice

    def begin(self, *job: Any) -> None:
        self.connection.send(job)
        self.busy, self.ended = True, False

    def sources(self) -> list[Any]:
        """What wakes who waits for the end of the job, or of the process."""
        return [self.process.sentinel, *([] if self.connection.closed else [self.connection])]

    def poll(self) -> None:
        """Look whether the job has ended, or the process has."""
        try:
            if not self.connection.closed and self.connection.poll():
                self.ended = self.connection.recv()
                self.busy = False
        except (EOFError, OSError):
            self.connection.close()  # the process is about to end
        self.busy = self.busy and self.process.is_alive()

    def end(self) -> int:
        """End the process; returns its exit code, or 0 if it had done its job."""
        self.connection.close()
        if self.busy:
            self.process.kill()
        self.process.join()
        return self.process.exitcode or 0


_idle: dict[int, _Rank] = {}  # each keeps its number: what it remembers of DTensor's splits depends on the rank


def rerun(target: Callable[..., None], args: Sequence[tuple[Any, ...]], timeout_s: float = HANG_S) -> Result:
    """Call `target(*args[rank])` in one process per rank, which may have run other trainings before.

    `target` must leave the process as it was, but for what `_State` knows; a process in which threads or a process
    group are left is not used again.
    """
    here = [_idle.pop(rank, None) or _Rank() for rank in range(len(args))]
    result = _run(here, target, args, timeout_s)
    _idle.update((rank, one) for rank, one in enumerate(here) if one.ended)
    return result


def spawn(
    target: Callable[..., None],
    args: Sequence[tuple[Any, ...]],
    timeout_s: float = HANG_S,
    meddle: Callable[[list[int]], None] | None = None,
) -> Result:
    """Call `target(*args[rank])` in one new process per rank, with torchrun's environment.

    `meddle` runs beside them in a thread, and gets their process ids.
    """
    here = [_Rank() for _ in args]
    if meddle:
        pids = [one.process.pid for one in here]
        threading.Thread(target=meddle, args=(pids,), daemon=True).start()
    result = _run(here, target, args, timeout_s)
    for one in here:
        one.end()
    return result


results: list[Result] = []  # of the trainings of the test that runs; tests/conftest.py prints those of one that fails


def wait_for(condition: Callable[[], Any], what: object = "what the test waits for did not happen") -> Any:
    """Returns what `condition` returns, once that is true; `what` is printed where it never becomes true."""
    end = time.monotonic() + HANG_S
    while not (found := condition()):
        if time.monotonic() > end:
            raise AssertionError(str(what))
        time.sleep(0.02)
    return found


def end_idle() -> None:
    """End the processes that wait for another training."""
    while _idle:
        _idle.popitem()[1].end()


atexit.register(end_idle)  # before multiprocessing waits for its processes; in a fork of this one, too


def _run(here: list[_Rank], target: Callable[..., None], args: Sequence[tuple[Any, ...]], timeout_s: float) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in range(len(here))]
        port = free_port()
        for rank, one in enumerate(here):
            one.begin(rank, len(here), port, str(outputs[rank]), target, args[rank])
        deadline = time.monotonic() + timeout_s
        failed = False
        while (busy := [one for one in here if one.busy]) and (left := deadline - time.monotonic()) > 0:
            connection.wait([source for one in busy for source in one.sources()], left)
            for one in busy:
                one.poll()
            if not failed and any(one.process.exitcode for one in here):
                failed = True
                deadline = min(deadline, time.monotonic() + GRACE_S)
        codes = [0 if one.ended else one.end() for one in here]
        result = Result(codes, [path.read_text() for path in outputs], target, args)
        results.append(result)
        return result


def _serve(jobs: Any) -> None:
    """A rank's life: jobs, until the other end of the connection is closed."""
    import torch
    from tqdm import tqdm

    from tests.harness import propagation

    propagation.keep()
    tqdm.monitor_interval = 0  # else a thread for bars, which nobody sees here, outlives each of them
    multiprocessing.set_start_method("fork", force=True)  # for loader workers, as in a process that torchrun starts
    torch.set_num_threads(1)  # the same sums in the same order, however busy the machine is
    flops.peak_flops = functools.cache(flops.peak_flops)  # measuring takes as long as a short training
    health.find_fault = functools.cache(health.find_fault)  # a planted one is looked for in a new process
    as_it_was = _State()
    while True:
        try:
            rank, world_size, port, output, target, args = jobs.recv()
        except EOFError:
            return
        with Path(output).open("wb", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        target(*args)
        sys.stdout.flush()
        sys.stderr.flush()
        clean = as_it_was.restore()
        jobs.send(clean)
        if not clean:
            return


class _State:
    """What a training changes in its process, and that its next one must not see."""

    def __init__(self) -> None:
        import torch._functorch.config as functorch

        self._environ = dict(os.environ)
        self._argv, self._path = list(sys.argv), list(sys.path)
        self._masked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        self._handlers = {number: signal.getsignal(number) for number in stop.SIGNALS}
        self._donated = functorch.donated_buffer

    def restore(self) -> bool:
        """Put back what a training that has ended well leaves; returns whether that is all that it has left."""
        import torch
        import torch._functorch.config as functorch
        from accelerate.state import AcceleratorState, GradientState

        from tests.harness import propagation

        os.environ.clear()
        os.environ.update(self._environ)
        sys.argv[:], sys.path[:] = self._argv, self._path
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masked)
        # What Accelerate has found in its environment lives as long as the process.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        functorch.donated_buffer = self._donated
        devices.configure("highest", deterministic=False)
        torch._dynamo.reset()
        propagation.forget_groups()
        gc.collect()
        # DTensor's caches outlive a process group: with torch 2.11 the next training uses the groups of the last one.
        clean = torch.__version__ >= "2.15"
        # A client of object stores has threads for all of a process: they wait for what the next training asks.
        left = [one for one in threading.enumerate() if not one.name.startswith(("MainThread", "fsspecIO", "asyncio_"))]
        return clean and not left and not torch.distributed.is_initialized()


def run_path(path: str, argv: list[str]) -> None:
    """Run a train.py in this process."""
    sys.argv = argv
    runpy.run_path(path, run_name="__main__")


@contextlib.contextmanager
def unmeasured() -> Iterator[None]:
    """Leave out the count of FLOPs, which takes longer than a few steps, where nobody reads the figure."""
    real = flops.count_sample
    flops.count_sample = lambda _loss, _model, train: flops.Sample(0.0, train.sample_units)
    try:
        yield
    finally:
        flops.count_sample = real


@contextlib.contextmanager
def without_graphs() -> Iterator[None]:
    """Let a training fail whose sums of a step hold a graph: that would keep activations until the next step."""
    real = guard.FiniteGuard.unscale_gradients

    def unscale(finite: guard.FiniteGuard, sums: metrics.Sums) -> None:
        kept = [key for key, value in sums.items() if value.requires_grad]
        assert not kept, f"the sums of {kept} hold a graph"
        real(finite, sums)

    guard.FiniteGuard.unscale_gradients = unscale  # type: ignore[method-assign]
    try:
        yield
    finally:
        guard.FiniteGuard.unscale_gradients = real  # type: ignore[method-assign]


def run_unmeasured(path: str, argv: list[str]) -> None:
    """Run a train.py in this process without a count of FLOPs."""
    with unmeasured(), without_graphs():
        run_path(path, argv)


def run_traced(path: str, argv: list[str]) -> None:
    """The same, where --compile traces, forward and backward, but does not translate to C++: half a minute each."""
    import torch

    real = torch.compile
    torch.compile = functools.partial(real, backend="aot_eager")
    try:
        run_unmeasured(path, argv)
    finally:
        torch.compile = real


def records(run: Path, tag: str) -> dict[int, float]:
    """Step to value of one tag of a run, in float64."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: float("nan") if line[tag] is None else line[tag] for line in lines if tag in line}


def sections(text: str) -> dict[int, str]:
    """Split a train.py at its banners; 0 is the docstring and the imports."""
    parts = re.split(r"^# --- (\d) \w+ -+$", text, flags=re.MULTILINE)
    return {0: parts[0]} | {int(number): body for number, body in zip(parts[1::2], parts[2::2], strict=True)}
