"""From stacks and heartbeats to the name of the culprit: pure functions."""

import linecache
import math
import re
import traceback
from collections.abc import Iterable
from types import FrameType
from typing import Any

from common import private_api
from common.run.process_group import NCCL_ADVICE, SAVING

# (phase, file, function), where "" stands for any function of the file: the first entry found on the main thread's
# stack names the phase. Recipes may name their functions freely, so these are functions that recipes call.
PHASES = (("save", "common/state/saver.py", ""), ("data", "common/train/data.py", "__next__"), *private_api.FRAMES)
Beat = dict[str, Any]
SPINS = 2  # times --hang-timeout for a rank that moves


def phase_and_stack(frames: Iterable[tuple[FrameType, int]], noted: str = "") -> tuple[str, str]:
    """Phase of training that a thread is in, and its relevant frames as text.

    Args:
        frames: the thread's stack, outermost frame first.
        noted: the phase, if the run itself has noted it.
    """
    stack = [*frames]
    ours = [one for one in stack[:-1] if "site-packages" not in one[0].f_code.co_filename]
    shown = "".join(traceback.format_list([*map(_summary, [*ours[-4:], *stack[-1:]])]))
    places = [(frame.f_code.co_filename, frame.f_code.co_name) for frame, _ in stack]
    found = (phase for phase, file, name in PHASES if any(file in at and name in ("", inside) for at, inside in places))
    return noted or next(found, "the main loop"), shown


def _summary(place: tuple[FrameType, int]) -> traceback.FrameSummary:
    """A frame as text. Its line is read once: StackSummary.extract looks at all files again, in each heartbeat."""
    frame, line = place
    code = frame.f_code
    linecache.lazycache(code.co_filename, frame.f_globals)
    return traceback.FrameSummary(code.co_filename, line, code.co_name, lookup_line=False)


def waits_in(record: dict[str, Any], stack: str, phase: str) -> str:
    """The collective that this rank has begun and not finished, or a point-to-point message; else "".

    Those of a save count only while the main thread is in the save too: otherwise it is written beside the training.
    gloo does not record messages: the stack shows that a function of torch waits for one, or that a line does.
    """
    for entry in record.get("entries", []):
        if not entry["retired"] and (phase == "save" or entry["process_group"][1] != SAVING):
            call = f"{entry['profiling_name']} {entry['input_sizes']}"
            return f"{call}, number {entry['collective_seq_id']} of group {entry['process_group'][1]}"
    message = re.search(rf", in ({'|'.join(private_api.MESSAGES)})$|^ +\w+\.wait\(\)\n\Z", stack, re.MULTILINE)
    return "a message between two ranks" if message else ""


def describe(beat: Beat) -> str:
    """One rank's name, phase, collective and stack, as text."""
    waits = f", waiting in {beat['waits_in']}" if beat["waits_in"] else ""
    return f"{beat['name']}: {beat['phase']}{waits}\n{beat['stack']}"


def accuse_dead(beats: list[Beat], dead: set[int]) -> str:
    """Name the ranks whose heartbeat has stopped."""
    return "".join(f"dead or frozen; last heartbeat of {describe(beat)}" for beat in beats if beat["rank"] in dead)


def has_spun(beat: Beat, most_s: float = math.inf) -> bool:
    """Whether a rank has been in one phase of one step for so long that it will not end, though it may move."""
    return beat["spun_s"] >= min(beat["spins_s"], most_s)


def no_progress(beat: Beat) -> str:
    """That a rank does not get anywhere, and where it is."""
    how = f"for {beat['limit_s']:g} s"
    if beat["stalled_s"] < beat["limit_s"] / 2:
        moves = ", though it moves" if beat["stalled_s"] < beat["spun_s"] / 2 else ""
        how = f"for {beat['spun_s']:g} s{moves} (raise --hang-timeout if it needs longer)"
    return f"no progress {how}: {describe(beat)}"


def accuse_stalled(beats: list[Beat]) -> str:
    """Name the rank that the others wait for; "" while that rank still makes progress, or has time for its phase."""
    not_waiting = [beat for beat in beats if not beat["waits_in"]]
    if any(beat["stalled_s"] < beat["limit_s"] / 2 and not has_spun(beat) for beat in not_waiting or beats):
        return ""
    waiting = [beat["rank"] for beat in beats if beat["waits_in"]]
    if not_waiting:
        tail = f"ranks {waiting} are waiting for it\n" if waiting else ""
        return "".join(map(no_progress, not_waiting)) + tail
    limit_s = max(beat["limit_s"] for beat in beats)
    never = all("nccl" in beat["waits_in"] and ", number 1 of " in beat["waits_in"] for beat in beats)
    shown = "".join(map(describe, beats)) + never * f"it is the first collective: {NCCL_ADVICE}"
    return f"no progress for {limit_s:g} s: all ranks are waiting for each other:\n{shown}"
