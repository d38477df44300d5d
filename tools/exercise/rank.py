"""One rank of a check: runs the main of a bare.py on a small model and small data, in float64, and notes what it does.

Whatever the file calls is the real thing but its model and its data: processes, collectives, optimizer and files.
"""

import contextlib
import importlib.util
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from common.workloads import gpt
from tools.exercise.compare import Record
from tools.exercise.exercises import CONSTANTS

SAMPLES = 42  # of the data set; a multiple of nothing that divides them
CLASSES = 10
TOKENS = 61
LENGTH = 16  # tokens of a sequence


class Few:
    """A small data set with the interface of common/workloads: its content is random, and the same everywhere."""

    channels = 1
    size = 8
    vocab_size = TOKENS
    class_names = tuple(map(str, range(CLASSES)))

    def __init__(self, make: Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]) -> None:
        self.inputs, self.targets = map(torch.from_numpy, make(np.random.default_rng(0)))
        self.read_now = 0  # samples since the last step

    def __len__(self) -> int:
        """Samples."""
        return len(self.inputs)

    def read(self, epochs: np.ndarray, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of some samples."""
        self.read_now += len(indices)
        return self.inputs[indices], self.targets[indices]


def some_images(draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Grey images of 8 x 8 bytes, and their classes."""
    return draw.integers(256, size=(SAMPLES, 1, 8, 8), dtype=np.uint8), draw.integers(CLASSES, size=SAMPLES)


def some_text(draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of tokens, and the tokens that follow."""
    tokens = draw.integers(TOKENS, size=(SAMPLES, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def small_resnet(*_: object) -> nn.Module:
    """Convolutions and BatchNorm, as many as a check needs. Each rank draws other weights, whatever the file's seed."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    layers: list[nn.Module] = [nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 4 * 4, CLASSES))


def small_shape(vocab_size: int, num_layers: int, num_heads: int, width: int) -> gpt.Shape:
    """Of a GPT as deep as the file asks for, and narrow."""
    return gpt.Shape(vocab_size, num_layers, num_heads, min(width, 32), mlp_width=44)


def load(path: Path) -> ModuleType:
    """A bare.py as a module, without its main."""
    spec = importlib.util.spec_from_file_location("bare", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def watched(module: ModuleType, record: Record, report: Callable[[int], None]) -> None:
    """Give a bare.py small things to work on, and note what it does with them."""
    few = Few(some_images if hasattr(module, "images") else some_text)
    small: dict[str, Any] = {name: value for name, value in CONSTANTS.items() if hasattr(module, name)}
    small["images"] = small["text"] = SimpleNamespace(load=lambda *_, **__: (few, few))
    small["resnet"] = SimpleNamespace(make_resnet=small_resnet)
    small["gpt"] = SimpleNamespace(GPT=gpt.GPT, Shape=small_shape, sequence_losses=gpt.sequence_losses)
    small["print"] = lambda *words, **_: record.printed.append(" ".join(map(str, words)))
    train_step, parallelize = module.train_step, module.parallelize
    sends = [0]  # forward passes since the last step whose backward pass lets DDP send

    def noted_step(model: Any, optimizer: Any, *batch: torch.Tensor) -> Any:
        record.reads.append(few.read_now)
        few.read_now = sends[0] = 0
        loss, norm = train_step(model, optimizer, *batch)
        record.sends.append(sends[0])
        record.losses.append(float(loss))
        record.norms.append(float(norm))
        record.held = held(model, optimizer)
        report(len(record.losses))
        return loss, norm

    def noted_parallelize(*args: Any) -> Any:
        model = parallelize(*args)
        if isinstance(model, DistributedDataParallel):
            model.register_forward_pre_hook(count)
        if any(isinstance(one, DTensor) for one in model.parameters()):  # split: how much of it is here at once?
            for part in model.modules():
                if not list(part.children()):
                    part.register_forward_pre_hook(lambda *_: look(model))
        return model

    def look(model: Any) -> None:
        with torch.no_grad():
            record.most = max(record.most, sum(local(one).numel() for one in model.parameters()))

    def count(model: Any, *_: object) -> None:
        sends[0] += model.require_backward_grad_sync

    vars(module).update(small, train_step=noted_step, parallelize=noted_parallelize)


def held(model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Elements of parameters and of the optimizer's state in this process."""
    states = [one for state in optimizer.state.values() for one in state.values() if torch.is_tensor(one) and one.ndim]
    return sum(local(one).numel() for one in [*model.parameters(), *states])


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def run_main(path: Path, argv: list[str], record: Record, report: Callable[[int], None]) -> None:
    """Run a bare.py's main in this process."""
    module = load(path)
    for name in ("main", "train_step", "parallelize"):
        if not callable(getattr(module, name, None)):
            record.error = f"the file has no function {name}, which the check calls"
            return
    watched(module, record, report)
    sys.argv = [str(path), *argv]
    module.main()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


class Crash(BaseException):
    """What ends a process in the middle of a save."""


@contextlib.contextmanager
def crash_in_save() -> Iterator[None]:
    """Let torch.save write half of a file, and end there."""
    real: Any = torch.save

    def half(state: object, to: Any) -> None:
        real(state, to)
        with Path(to).open("r+b") as file:
            file.truncate(Path(to).stat().st_size // 2)
        raise Crash

    patched: Any = torch
    patched.save = half
    try:
        yield
    finally:
        patched.save = real


def names_in(path: Path) -> list[str]:
    """Names of the model's tensors in a checkpoint that is one file."""
    if not path.is_file():
        return []
    return sorted(torch.load(path, map_location="cpu", weights_only=True).get("model", {}))


def serve(connection: Any, rank: int, size: int, port: int, path: str, argv: list[str], crash: bool) -> None:
    """Run a bare.py as one of `size` ranks, and send ("step", number) for each step and ("end", Record) at last."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who asked ends us
    for stream in (1, 2):  # what libraries print says nothing about the exercise
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    warnings.simplefilter("ignore")
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    record = Record()
    try:
        with crash_in_save() if crash else contextlib.nullcontext():
            run_main(Path(path), argv, record, lambda step: connection.send(("step", step)))
        if "--checkpoint" in argv and rank == 0:  # which writes the file, if it is one
            record.names = names_in(Path(argv[-1]))
    except Crash:
        record.crashed = True
    except BaseException as error:  # whatever the reader's file raises is an answer
        record.error = said(error, path)
    connection.send(("end", record))
    connection.close()
    os._exit(0)  # a process group that hangs would keep the process


def said(error: BaseException, path: str) -> str:
    """An error and the last line of the file that it came through."""
    places = [one for one in traceback.extract_tb(error.__traceback__) if one.filename == path]
    place = f"line {places[-1].lineno}, `{places[-1].line}`: " if places else ""
    text = (str(error).strip() or "no message").splitlines()[0]
    if isinstance(error, SyntaxError):
        place = f"line {error.lineno}: "
    return f"{place}{type(error).__name__}: {text[:300]}"
