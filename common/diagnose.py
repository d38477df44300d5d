"""From stacks and heartbeats to the name of the culprit: pure functions."""

import json
import re
import traceback
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch

# (phase, file, function), where "" stands for any function of the file: the first entry found on the main thread's
# stack names the phase.
PHASES = (
    ("evaluation", "train.py", "evaluate"),
    ("save", "common/saver.py", ""),
    ("data", "common/data.py", "__next__"),
    ("collective", "torch/distributed/distributed_c10d.py", ""),
    ("optimizer", "torch/optim/", ""),
    ("backward", "torch/_tensor.py", "backward"),
    ("backward", "torch/distributed/pipelining/_backward.py", ""),
    ("forward", "train.py", "forward"),
    ("forward", "torch/distributed/pipelining/stage.py", "forward_one_chunk"),
)
Beat = dict[str, Any]
SAVING = "checkpoint"  # name of the process group that writes checkpoints beside the training


def phase_and_stack(frames: Iterable[tuple[FrameType, int]]) -> tuple[str, str]:
    """Phase of training that a thread is in, and its relevant frames as text, outermost first."""
    stack = traceback.StackSummary.extract(frames)
    ours = [frame for frame in stack[:-1] if "site-packages" not in frame.filename]
    shown = "".join(traceback.format_list([*ours[-4:], *stack[-1:]]))
    for phase, file, function in PHASES:
        if any(file in frame.filename and function in ("", frame.name) for frame in stack):
            return phase, shown
    return "the main loop", shown


def flight_recorder(device: torch.device, only_active: bool) -> dict[str, Any]:
    """Flight recorder's entries for this rank's collectives; {} from a torch that lacks these private functions."""
    name = "_dump_nccl_trace_json" if device.type == "cuda" else "_dump_fr_trace_json"
    dump = getattr(torch._C._distributed_c10d, name, None)
    return json.loads(dump(True, only_active)) if dump else {}


def waits_in(record: dict[str, Any], stack: str) -> str:
    """The collective that this rank has begun and not finished, or a point-to-point message; else "".

    gloo does not record messages: the stack shows them.
    """
    for entry in record.get("entries", []):
        if not entry["retired"] and entry["process_group"][1] != SAVING:
            number, name, group = entry["collective_seq_id"], entry["profiling_name"], entry["process_group"][1]
            return f"{name} {entry['input_sizes']}, number {number} of group {group}"
    return "a message between two ranks" if re.search(r", in (_wait_batch_p2p|recv|send)$", stack, re.M) else ""


def describe(beat: Beat) -> str:
    """One rank's name, phase, collective and stack, as text."""
    waits = f", waiting in {beat['waits_in']}" if beat["waits_in"] else ""
    return f"{beat['name']}: {beat['phase']}{waits}\n{beat['stack']}"


def accuse_dead(beats: list[Beat], dead: set[int]) -> str:
    """Name the ranks whose heartbeat has stopped."""
    return "".join(f"dead or frozen; last heartbeat of {describe(beat)}" for beat in beats if beat["rank"] in dead)


def accuse_stalled(beats: list[Beat], limit_s: float) -> str:
    """Name the rank that the others wait for; "" while that rank still makes progress."""
    not_waiting = [beat for beat in beats if not beat["waits_in"]]
    if any(beat["stalled_s"] < limit_s / 2 for beat in not_waiting):
        return ""
    waiting = [beat["rank"] for beat in beats if beat["waits_in"]]
    if not_waiting:
        tail = f"ranks {waiting} are waiting for it\n" if waiting else ""
        return "".join(f"no progress for {limit_s:g} s: {describe(beat)}" for beat in not_waiting) + tail
    return f"no progress for {limit_s:g} s: all ranks are waiting for each other:\n" + "".join(map(describe, beats))
