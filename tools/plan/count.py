"""Runs the recipe's own code on tensors without data, in a process of its own, and reads what a step did."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import UserError
from tools.plan.hardware import Hardware
from tools.plan.work import Traffic, Work

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900.0


class NotCountedError(UserError):
    """The recipe, with these flags, cannot be counted; the message is one sentence."""


@dataclass(frozen=True)
class Case:
    """A recipe's layout over ranks.

    Attributes:
        folder: that holds its train.py.
        size: number of ranks.
        flags: of train.py.
        config: path of a config file of Accelerate, or "".
    """

    folder: Path
    size: int
    flags: tuple[str, ...] = ()
    config: str = ""

    def __str__(self) -> str:
        return " ".join([str(self.folder), *self.flags])


def each(cases: Sequence[Case], machine: Hardware) -> Iterator[list[Work] | NotCountedError]:
    """The work of each case, in their order: one `Work` for each rank that differs from the others."""
    asked = [
        {
            "folder": str(case.folder.resolve()),
            "size": case.size,
            "flags": [*case.flags],
            "config": str(Path(case.config).resolve()) if case.config else "",
            "device": machine.device,
            "local_size": machine.local_size,
            "gpu": machine.gpu,
            "memory_bytes": int(machine.memory_bytes),
            "bf16": machine.bfloat16,
            "own_data": True,
            "only_step": True,
        }
        for case in cases
    ]
    # Through a pipe, as thousands of cases would be too long for a command line.
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tools.plan.counter"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    assert process.stderr
    process.stdin.write(json.dumps(asked))
    process.stdin.close()
    try:
        for case in cases:
            line = process.stdout.readline()
            if not line:
                said = process.stderr.read().strip().splitlines()
                yield NotCountedError(f"{case}: the process that counts has ended: {said[-1] if said else 'no word'}")
                return
            found = json.loads(line)
            yield (
                NotCountedError(refusal(case, found[-1]))
                if "error" in found[-1]
                else [to_work(one, case, machine) for one in found]
            )
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def count(case: Case, machine: Hardware) -> list[Work]:
    """The work of one case.

    Raises:
        NotCountedError: the recipe refuses the flags, or cannot run on tensors without data.
    """
    (found,) = each([case], machine)
    if isinstance(found, NotCountedError):
        raise found
    return found


def refusal(case: Case, found: dict[str, Any]) -> str:
    """One sentence about a case that could not be counted."""
    if found["refused"]:
        return f"{case.folder.name} on {case.size} ranks: {found['error']}"
    return (
        f"{case.folder.name} cannot be planned: on tensors without data, its step ends with {found['error']}; it must "
        "have the functions of a recipe's sections 2 to 4, and none of them may need a value of a tensor"
    )


def to_work(found: dict[str, Any], case: Case, machine: Hardware) -> Work:
    """What the counter has printed of a rank, as `Work`."""
    step = found["step"]
    places: dict[str, dict[str, float]] = {"product": {}, "convolution": {}, "attention": {}}
    moved = 0.0
    tf32 = machine.device == "cuda" and found["tf32"]
    for count_, bytes_, dtype, name, times in step["products"]:
        # cuDNN takes TF32 for convolutions of float32, unless it is set otherwise.
        kind = "tf32" if dtype == "float32" and machine.device == "cuda" and (tf32 or name == "convolution") else dtype
        place = places[name]
        place[kind] = place.get(kind, 0.0) + count_ * times
        moved += bytes_ * times
    # A message is there twice: where it is sent, and where it is received.
    traffic = [Traffic(**one) for one in step["traffic"] if one["kind"] != "receive"]
    micro = found["micro_batches"]
    return Work(
        world_size=case.size,
        samples=found["samples"],
        flops=places["product"],
        convolutions=places["convolution"],
        attention=places["attention"],
        exponentials=step["exponentials"],
        product_bytes=moved,
        elementwise_bytes=step["elementwise_bytes"],
        kernels=step["kernels"],
        traffic=tuple(replace(one, bytes=float(one.bytes)) for one in traffic),
        memory={kind: float(size) for kind, size in found["memory"].items()},
        state_bytes=found["state_bytes"],
        model_flops=found["sample_flops"] * found["samples"],
        micro_batches=micro,
        idle=found["idle"],
        units=found["units"],
        parameters=found["parameters"],
        active=found["active"],
    )
