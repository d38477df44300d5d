"""docs/troubleshooting.md: each error is provoked for real, in plain torch and in a recipe, and the page must fit.

An entry of the page is a heading, and a heading in backticks is the literal text. Below `Brigade prints`, each line of
the block must be printed by a recipe in which the same mistake is made. `...` stands for what varies. A function here
that `provokes` the heading makes the mistake: no list says which entries there are.
"""

import contextlib
import datetime
import functools
import mmap
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from common.run import process_group
from common.train import sampler
from launch.ports import free_port
from torch import nn
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from launch import rendezvous
from tests.harness import judged, mutants, runner
from tests.launch.test_launch import TORCHRUN, launch, shell
from tests.launch.test_rendezvous import explained, make

PAGE = runner.ROOT / "docs" / "troubleshooting.md"
MOST_LINES = 16
NOT_RUN = "Not run here"  # what the page says where only torch's own files were read
LIBRARIES = Path(torch.__file__).parent / "lib"
NVIDIA = Path(torch.__file__).parents[1] / "nvidia"
Said = tuple[str, str]  # what plain torch prints, and what Brigade prints
PROVOCATIONS: dict[str, Callable[[Path, Path], Said]] = {}
SLOW: set[str] = set()


def provokes(
    heading: str, slow: bool = False
) -> Callable[[Callable[[Path, Path], Said]], Callable[[Path, Path], Said]]:
    """Register what provokes an entry: it gets an empty folder and a small text."""

    def register(provoke: Callable[[Path, Path], Said]) -> Callable[[Path, Path], Said]:
        assert heading not in PROVOCATIONS, heading
        PROVOCATIONS[heading] = provoke
        SLOW.update([heading] * slow)
        return provoke

    return register


def entries(page: str) -> dict[str, str]:
    """Heading to text of each entry."""
    parts = re.split(r"^## (.*)\n", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def pattern(line: str) -> str:
    return ".*".join(map(re.escape, line.split("...")))


def faults_in(heading: str, text: str, said: Said) -> list[str]:
    """What is wrong with an entry of the page, given what was printed."""
    in_torch, in_brigade = said
    found = []
    if heading.startswith("`") and not re.search(pattern(heading.strip("`")), in_torch):
        found.append(f"plain torch does not print {heading}, but:\n{in_torch[-3000:]}")
    block = re.search(r"Brigade prints.*:\n\n```\n(.*?)```\n", text, re.DOTALL)
    lines = block[1].splitlines() if block else []
    found += [
        f"no recipe prints '{line}', but:\n{in_brigade}" for line in lines if not re.search(pattern(line), in_brigade)
    ]
    if bool(lines) != bool(in_brigade):
        found.append("a line that Brigade prints is missing on the page, or its provocation here")
    text = re.sub("<!-- begin .*<!-- end [^\n]*\n", "", text, flags=re.DOTALL)  # a generated table
    if len(text.splitlines()) > MOST_LINES + len(lines):
        found.append(f"{len(text.splitlines())} lines are too many")
    return found


ENTRIES = entries(PAGE.read_text())


def test_every_entry_is_provoked() -> None:
    assert set(ENTRIES) == set(PROVOCATIONS)


def test_altered_pages_are_found() -> None:
    """The mutants: an altered heading, an altered line of Brigade, and one that is gone."""
    said = "RuntimeError: something is wrong (3)", "error: it is 3, on rank 1"
    text = "Because.\n\nBrigade prints:\n\n```\nerror: it is ..., on\n```\n"
    assert faults_in("`something is wrong (...)`", text, said) == []
    assert len(faults_in("`something was wrong`", text, said)) == 1
    assert len(faults_in("`something is wrong`", text.replace("it is", "it was"), said)) == 1
    assert len(faults_in("`something is wrong`", "Because.\n", said)) == 1
    assert len(faults_in("`something is wrong`", text + MOST_LINES * "\n", said)) == 1


# --- the two ways to make a mistake ---------------------------------------------------------------------------


def plain(script: Callable[[], None], size: int = 1) -> str:
    """What plain torch prints on some ranks, in processes of their own, with the environment that torchrun gives."""
    result = runner.spawn(script, [()] * size)
    assert any(result.codes) or script in HARMLESS, str(result)
    return str(result)


def recipe(
    folder: Path, text: Path, changes: mutants.Changes, *flags: str, size: int = 2, base: str = "ddp_gpt"
) -> str:
    """What a recipe with such changes prints, on all ranks."""
    path = mutants.mutate(base, folder, changes) if changes else runner.ROOT / "recipes" / base / "train.py"
    steps = ("--max-steps", "4", "--global-batch-size", "8", "--log-every", "1", "--hang-timeout", "2")
    where = ("--data", str(text), "--out", str(folder / "runs"), "--name", "run")
    argv = [str(path), *runner.small(base), *steps, *where, *flags]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "GRACE_S", runner.PATIENT_S)  # whichever rank ends first, the others are to say why
        result = runner.spawn(runner.run_unmeasured, [(str(path), argv)] * size)
    logs = [path.read_text() for path in folder.glob("runs/run/logs/rank_*.log")]
    return "\n".join([*result.outputs, *logs])


def before_step(code: str) -> mutants.Changes:
    """Run this code in main before each training step."""
    step = "sums, grad_norm = train_step(args, model, optimizer, run.finite, batches, dp_size)"
    return {"main": {step: f"{code}\n{step}"}}


def in_file(text: str, pattern_of_files: str, root: Path = LIBRARIES) -> str:
    """A text and what follows it, as it stands in one of torch's files; "" if it does not."""
    files = sorted(root.rglob(pattern_of_files))
    if not files:
        pytest.skip(f"this torch has no {pattern_of_files}")
    for path in files:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at = content.find(text.encode())
            if at >= 0:
                return content[at : at + 300].split(b"\0")[0].decode(errors="replace")
    return ""


def test_text_that_is_in_no_file() -> None:
    assert in_file("Watchdog caught collective operation timeouts, many", "libtorch_cpu.so") == ""


# --- ranks that do not meet -----------------------------------------------------------------------------------


def port_in_use() -> None:
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.TCPStore("127.0.0.1", first.port, is_master=True, wait_for_workers=False)


def nobody_answers() -> None:
    dist.TCPStore("127.0.0.1", free_port(), is_master=False, timeout=datetime.timedelta(seconds=1))


def machine(hosts: str) -> str:
    """What the launcher of one of several machines prints, where another program listens at the port or nobody does."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("RUN_KEY", 32 * "0a")
        patch.setattr(rendezvous, "met", [])
        patch.setattr(rendezvous.Address, "number", 0, raising=False)
        port = free_port()
        if hosts == "1":
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        with pytest.raises(RendezvousConnectionError) as refusal:
            make(f"localhost:{port}", hosts=hosts)
        return explained(refusal.value, f"localhost:{port}")


@provokes("`EADDRINUSE, message: address already in use`")
def _(folder: Path, text: Path) -> Said:
    return plain(port_in_use), machine("1")


@provokes("`The client socket has timed out after ...ms while trying to connect to`")
def _(folder: Path, text: Path) -> Said:
    return plain(nobody_answers), machine("0")


def no_group() -> None:
    dist.all_reduce(torch.ones(1))


@provokes("`Default process group has not been initialized, please make sure to call init_process_group`")
def _(folder: Path, text: Path) -> Said:
    return plain(no_group), recipe(folder, text, {}, size=1)


@provokes("`unrecognized arguments: --local-rank=0`", slow=True)
def _(folder: Path, text: Path) -> Said:
    (folder / "script.py").write_text(
        'import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument("--local_rank")\nparser.parse_args()'
    )
    launcher = (sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node=1")
    in_torch = shell([*launcher, folder / "script.py"], MASTER_PORT=str(free_port()))
    return in_torch.stderr, recipe(folder, text, {}, "--local-rank=0", size=1)


def all_rank_0() -> None:
    port = int(os.environ["MASTER_PORT"])
    # In place of torchrun, which lets the ranks meet in a store of its own.
    store = dist.TCPStore("127.0.0.1", port, is_master=os.environ["RANK"] == "0", wait_for_workers=False)
    store.set("alive", "yes")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    dist.init_process_group("gloo", rank=0, world_size=2, timeout=datetime.timedelta(seconds=2))


@provokes("`wait timeout after ...ms, keys: /default_pg/`")
def _(folder: Path, text: Path) -> Said:
    return plain(all_rank_0, 2), ""


def wrapped_first() -> None:
    dist.init_process_group("cuda:gloo")  # as of NCCL: it knows GPUs alone
    DistributedDataParallel(nn.Linear(2, 2)).to("cuda")


def moved_first() -> None:
    dist.init_process_group("cpu:gloo")
    DistributedDataParallel(nn.Linear(2, 2).to("cpu"))


@provokes("`No backend type associated with device type cpu`")
def _(folder: Path, text: Path) -> Said:
    assert "No backend type" not in plain(moved_first)
    return plain(wrapped_first), ""


@provokes("`invalid device ordinal`")
def _(folder: Path, text: Path) -> Said:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "9")
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 8)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        assert process_group._pick_device(local_rank=1, local_size=8).index == 1
    return in_file("invalid device ordinal", "libcudart.so*", NVIDIA) or in_file("invalid device ordinal", "*.so"), ""


def to_cuda() -> None:
    nn.Linear(2, 2).cuda()


@provokes("`Found no NVIDIA driver on your system`")
def _(folder: Path, text: Path) -> Said:
    in_torch = plain(to_cuda)
    words = ("Found no NVIDIA driver on your system", "No CUDA GPUs are available", "Torch not compiled with CUDA")
    assert any(one in in_torch for one in words), in_torch
    if words[0] not in in_torch:  # a machine with a driver
        in_torch += in_file(words[0], "lib*.so")
    return in_torch, recipe(folder, text, {})


@provokes("Every process takes memory on GPU 0")
def _(folder: Path, text: Path) -> Said:
    return "", str(process_group._too_few(1, 2))


# --- ranks that wait ------------------------------------------------------------------------------------------

SLEEPS = before_step("import time\nif step == 3 and world.rank == 1: time.sleep(1000)")


@provokes("`Watchdog caught collective operation timeout`")
def _(folder: Path, text: Path) -> Said:
    return in_file("Watchdog caught collective operation timeout", "libtorch_cuda.so"), recipe(folder, text, SLEEPS)


@provokes("`ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error`")
def _(folder: Path, text: Path) -> Said:
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(process_group, "ADVICE_S", 0.1)
        patch.setattr(process_group.ranks, "print0", said.append)
        with process_group._advise(torch.device("cuda")):
            time.sleep(1)
    return in_file("ncclSystemError: System call", "libtorch_cuda.so"), "\n".join(said)


def only_rank_0() -> None:
    dist.init_process_group("gloo")
    impatient = dist.new_group(timeout=datetime.timedelta(seconds=2))
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), group=impatient)
    time.sleep(1000)


@provokes("`Timed out waiting ...ms for ... operation to complete`")
def _(folder: Path, text: Path) -> Said:
    alone = before_step("if step == 3 and world.rank == 0: torch.distributed.all_reduce(torch.ones(1), group=other)")
    made = "optimizer = make_optimizer(args, model)"
    alone["main"][made] = f"other = torch.distributed.new_group()\n{made}"  # type: ignore[index]
    return plain(only_rank_0, 2), recipe(folder, text, alone)


def one_exits() -> None:
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(1)
    dist.all_reduce(torch.ones(1))


@provokes("`Connection ... by peer`")
def _(folder: Path, text: Path) -> Said:
    dies = before_step("import os, time\nif step == 3 and world.rank == 1: time.sleep(1); os._exit(1)")
    return plain(one_exits, 2), recipe(folder, text, dies)


KILLED = "import os, signal\n\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGKILL)\n"


@provokes("`Signal 9 (SIGKILL) received by PID`", slow=True)
def _(folder: Path, text: Path) -> Said:
    (folder / "script.py").write_text(KILLED)
    in_torch = shell([TORCHRUN, "--standalone", "--nproc-per-node=2", folder / "script.py"])
    dies = before_step("import os, time\nif step == 3 and world.rank == 1: time.sleep(1); os.kill(os.getpid(), 9)")
    project = mutants.mutate("ddp_gpt", folder, dies).parent
    flags = (*runner.small("ddp_gpt"), "--data", text, "--out", folder / "runs", "--name", "run", "--max-steps", "4")
    result = launch(project, *flags)
    assert result.returncode == 137
    return in_torch.stderr, result.stdout + result.stderr


def no_goodbye() -> None:
    dist.init_process_group("gloo")
    dist.barrier()


@provokes("`destroy_process_group() was not called before program exit`")
def _(folder: Path, text: Path) -> Said:
    assert "destroy" not in plain(no_goodbye), "gloo does not warn"
    return in_file("destroy_process_group() was not called before program exit", "libtorch_cuda.so"), ""


@provokes("Processes stay behind", slow=True)
def _(folder: Path, text: Path) -> Said:
    dies = before_step("import os, signal\nif step == 3 and world.rank == 0: os.kill(os.getppid(), signal.SIGKILL)")
    project = mutants.mutate("ddp_gpt", folder, dies).parent
    flags = (*runner.small("ddp_gpt"), "--data", text, "--out", folder / "runs", "--name", "run", "--max-steps", "9999")
    return "", launch(project, *flags).stdout


# --- memory ---------------------------------------------------------------------------------------------------


@provokes("`CUDA out of memory. Tried to allocate`")
def _(folder: Path, text: Path) -> Said:
    full = before_step("if step == 2: model.register_forward_pre_hook(lambda *_: torch.empty(2**50))")
    return in_file("CUDA out of memory. Tried to allocate", "libc10_cuda.so"), recipe(folder, text, full, size=1)


# A loader whose worker needs 128 MB of shared memory for a tensor; and one that writes as much there by itself.
LOADER = """
import torch

class Big(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        {}

for batch in torch.utils.data.DataLoader(Big(), num_workers=1):
    pass
"""
TENSOR = "return torch.ones(2**27, dtype=torch.uint8), 0"
WRITES = "open('/dev/shm/big', 'wb').truncate(2**27); torch.from_file('/dev/shm/big', True, 2**24).fill_(1)"


def in_small_memory(*command: str | Path) -> str:
    """What a command prints where /dev/shm has 64 MB, as Docker gives it to a container; needs root."""
    small = "mount -t tmpfs -o size=64m tmpfs /dev/shm || exit 77\n" + 'exec "$@"'
    result = shell(["unshare", "--mount", "sh", "-c", small, "sh", *command])
    if "unshare: " in result.stderr or "mount: " in result.stderr:
        assert not os.environ.get("CI"), result.stderr
        pytest.skip(f"no mount of one's own: {result.stderr}")
    assert result.returncode
    return result.stdout + result.stderr


def in_loader(folder: Path, text: Path, code: str) -> Said:
    """What plain torch and a recipe print whose loader's worker runs this code, with 64 MB of shared memory."""
    (folder / "script.py").write_text(LOADER.format(code))
    data = "train, validation = make_data(args)"
    reads = (
        f"{data}\nread = train.read\n"
        f"def big(*at):\n    if torch.utils.data.get_worker_info() is None: return read(*at)\n    {code}\n"
        "object.__setattr__(train, 'read', big)"
    )
    path = mutants.mutate("ddp_gpt", folder, {"main": {data: reads}})
    flags = (*runner.small("ddp_gpt"), "--data", text, "--out", folder / "runs", "--name", "run", "--workers", "1")
    in_torch = in_small_memory(sys.executable, folder / "script.py")
    return in_torch, in_small_memory(sys.executable, path, *flags)


@provokes("`unable to allocate shared memory(shm) for file`", slow=True)
def _(folder: Path, text: Path) -> Said:
    return in_loader(folder, text, TENSOR)


@provokes("`DataLoader worker (pid ...) is killed by signal: Bus error`", slow=True)
def _(folder: Path, text: Path) -> Said:
    return in_loader(folder, text, WRITES)


class Tensors(torch.utils.data.Dataset):
    """Each sample is a tensor, and the open file of one."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2)


def many_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    [*torch.utils.data.DataLoader(Tensors(), num_workers=1)]


@provokes("`Too many open files`")
def _(folder: Path, text: Path) -> Said:
    return plain(many_files), ""


# --- what is computed -----------------------------------------------------------------------------------------


class Unused(nn.Module):
    """Has a layer that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def unused_parameter() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Unused())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


@provokes("`Expected to have finished reduction in the prior iteration before starting a new one`")
def _(folder: Path, text: Path) -> Said:
    made = "model = make_model(args, train)"
    forgets = {"main": {made: f'{made}\nmodel.forgotten = torch.nn.Linear(2, 2, device="meta")'}}
    return plain(unused_parameter), recipe(folder, text, forgets)


def wrong_label() -> None:
    F.cross_entropy(torch.zeros(2, 10), torch.tensor([1, 12]))


@provokes("`device-side assert triggered`")
def _(folder: Path, text: Path) -> Said:
    """The kernel's own words come from CUDA's library; the same mistake has a plain error on a CPU."""
    assert "Target 12 is out of bounds" in plain(wrong_label)
    wrong = before_step("model.register_forward_pre_hook(lambda module, given: (given[0], given[1] + 1000))")
    said = in_file("device-side assert triggered", "libcudart.so*", NVIDIA) or in_file("device-side assert", "*.so")
    return said, recipe(folder, text, wrong, size=1)


@provokes("`Expected all tensors to be on the same device, but found at least two devices`")
def _(folder: Path, text: Path) -> Said:
    return in_file(
        "Expected all tensors to be on the same device, but found at least two devices", "libtorch_cpu.so"
    ), ""


def recompiles() -> None:
    double = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
    for length in range(2, 12):
        double(torch.ones(length))


@provokes("`torch._dynamo hit config.recompile_limit`")
def _(folder: Path, text: Path) -> Said:
    return plain(recompiles), ""


# --- checkpoints ----------------------------------------------------------------------------------------------


def module_prefix() -> None:
    model = nn.Linear(2, 2)
    model.load_state_dict(nn.DataParallel(model).state_dict())


@provokes('`Missing key(s) in state_dict: "weight", "bias"`')
def _(folder: Path, text: Path) -> Said:
    recipe(folder / "first", text, {}, "--stop-after", "1", size=1)
    (step,) = (folder / "first").glob("runs/run/checkpoints/step_*")
    from safetensors.torch import load_file

    weights = {name: value for file in step.glob("*model*.safetensors") for name, value in load_file(file).items()}
    torch.save(
        {f"module.{name}": value for name, value in weights.items() if "optimizer" not in name}, folder / "ddp.pt"
    )
    return plain(module_prefix), recipe(folder, text, {}, "--init", str(folder / "ddp.pt"), size=1)


def other_size() -> None:
    nn.Linear(2, 2).load_state_dict(nn.Linear(3, 2).state_dict())


@provokes("`size mismatch for weight: copying a param with shape torch.Size(...) from checkpoint`")
def _(folder: Path, text: Path) -> Said:
    recipe(folder, text, {}, "--stop-after", "1", size=1)
    wider = ("--resume", str(folder / "runs" / "run"), "--name", "wider", "--width", "16")
    return plain(other_size), recipe(folder, text, {}, *wider, size=1)


class Own:
    """A class of one's own in a file of torch.save."""


def unsafe_file() -> None:
    torch.save({"model": Own()}, "unsafe.pt")
    torch.load("unsafe.pt")


@provokes("`Weights only load failed`")
def _(folder: Path, text: Path) -> Said:
    torch.save({"model": Own()}, folder / "unsafe.pt")
    in_torch = plain(functools.partial(load, str(folder / "unsafe.pt")))
    return in_torch, recipe(folder, text, {}, "--init", str(folder / "unsafe.pt"), size=1)


def load(path: str) -> None:
    torch.load(path)


# --- symptoms without an error --------------------------------------------------------------------------------


@provokes("More GPUs are not faster")
def _(folder: Path, text: Path) -> Said:
    data = "train, validation = make_data(args)"
    slow = (
        f"{data}\nimport time\nread = train.read\n"
        "object.__setattr__(train, 'read', lambda *at: (time.sleep(1), read(*at))[1])"
    )
    return "", recipe(folder, text, {"main": {data: slow}}, size=1)


@provokes("Another loss on N GPUs", slow=True)
def _(folder: Path, text: Path) -> Said:
    """Means of means: two ranks with 1 and 3 samples; and the same command on one and two ranks."""
    losses = torch.tensor([4.0, 0.0, 0.0, 0.0])
    assert (losses[:1].mean() + losses[1:].mean()) / 2 != losses.mean()
    said = [recipe(folder / str(size), text, {}, "--dtype", "float64", size=size) for size in (1, 2)]
    curves = [runner.records(folder / str(size) / "runs" / "run", "train/loss") for size in (1, 2)]
    assert list(curves[0]) == [1, 2, 3, 4]
    assert all(abs(curves[0][step] - curves[1][step]) < 1e-9 for step in curves[0])
    return "", said[1]


@provokes("The same order in every epoch: set_epoch was forgotten")
def _(folder: Path, text: Path) -> Said:
    plain_order = torch.utils.data.DistributedSampler(range(9), num_replicas=1, rank=0)
    assert [*plain_order] == [*plain_order], "torch's own, without set_epoch"
    plan = sampler.make_plan(sampler.divide_batch(9, 0, 1), 9, run_seed=0, epochs=2, max_steps=0, progress={})
    one, two = (request.indices.tolist() for request in sampler.training_requests(plan, 0))
    assert sorted(one) == sorted(two)
    assert one != two
    return "", ""


@provokes("No error, and the training is not what it should be", slow=True)
def _(folder: Path, text: Path) -> Said:
    one = next(one for one in judged.MISTAKES if one.kind == "zero_grad is missing")
    (folder / "train.py").write_text(one.text())
    words = [sys.executable, "-m", "tools.judge", "--once", "train.py"]
    env = os.environ | {"PYTHONPATH": str(runner.ROOT)}
    how = {"cwd": folder, "env": env, "capture_output": True, "text": True, "timeout": runner.HANG_S}
    done = subprocess.run(words, check=False, **how)
    assert f"train.py:{one.number()}: error: zero_grad is missing" in done.stdout, done.stdout + done.stderr
    return "", ""


@provokes("bfloat16 or FSDP trains worse than DDP in float32", slow=True)
def _(folder: Path, text: Path) -> Said:
    weight = torch.ones((), dtype=torch.bfloat16)
    assert weight + 1e-3 == weight, "an update that is lost"
    return "", recipe(folder, text, {}, "--dtype", "float64", base="fsdp_gpt")


def long_sequence() -> None:
    import tokenizers
    import transformers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=4)("a a a a a")


@provokes("`Token indices sequence length is longer than the specified maximum sequence length for this model`")
def _(folder: Path, text: Path) -> Said:
    return plain(long_sequence), recipe(folder, text, {}, "--seq-len", "32", size=1)


@provokes("Ranks train apart: the model was never wrapped")
def _(folder: Path, text: Path) -> Said:
    wrap = "return DistributedDataParallel(model, process_group=mesh.get_group('dp'), gradient_as_bucket_view=True)"
    plain_model = "model.no_sync = contextlib.nullcontext\nreturn model"
    return "", recipe(folder, text, {"parallelize": {wrap: plain_model}})


def broadcast_loss() -> None:
    outputs, targets = torch.zeros(4), torch.arange(4.0)[:, None]
    loss = F.mse_loss(outputs, targets)
    assert loss == ((outputs - targets) ** 2).mean() == (targets**2).mean(), "of 16 pairs"
    try:
        F.cross_entropy(torch.zeros(64, 10), torch.zeros(32, dtype=torch.long))
    except ValueError as error:
        print(error)


@provokes("`Using a target size (torch.Size(...)) that is different to the input size (torch.Size(...))`")
def _(folder: Path, text: Path) -> Said:
    in_torch = plain(broadcast_loss)
    assert "Expected input batch_size (64) to match target batch_size (32)" in in_torch
    losses = "losses = model(batch.inputs, batch.targets)"
    broadcast = f"{losses}\nlosses = losses - torch.zeros_like(losses)[:, None]"
    return in_torch, recipe(folder, text, {"forward": {losses: broadcast}})


HARMLESS = (recompiles, long_sequence, broadcast_loss, moved_first, no_goodbye)  # they warn at most


@provokes("`Job credential revoked`")
def _(folder: Path, text: Path) -> Said:
    return in_file("Job credential revoked", "libslurmfull.so", Path("/usr/lib")), ""


# --- last, because the entries are registered above --------------------------------------------------------


@pytest.mark.parametrize(
    "heading", [pytest.param(one, marks=[pytest.mark.rest] * (one in SLOW)) for one in PROVOCATIONS]
)
def test_entry(heading: str, small_text: Path, tmp_path: Path) -> None:
    assert faults_in(heading, ENTRIES[heading], PROVOCATIONS[heading](tmp_path, small_text)) == []
