"""What the watching thread says of its rank: once, and in the phase that the run has noted."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import TextIO

from common import manifest
from common.protect import heartbeat, watch
from common.run import exits, process_group
from common.train import data
from tqdm import tqdm

from tests.harness import runner


def start(folder: str) -> watch.Watch:
    (Path(folder) / "logs").mkdir(parents=True)
    watching = watch.Watch(process_group.start())
    watching.begin(Path(folder), 0, hang_timeout_s=60.0)
    return watching


def find_twice(folder: str) -> None:
    """The main thread and the watching one have the same finding at the same time."""
    watching = start(folder)
    other = threading.Thread(target=watching._exit, args=("rank 9 is dead\n",), daemon=True)
    other.start()
    watching._exit("rank 9 is dead\n")


def test_a_finding_is_printed_once(tmp_path: Path) -> None:
    result = runner.spawn(find_twice, [(str(tmp_path / "run"),)])
    assert result.codes == [exits.PEER_FAILED], str(result)
    assert result.outputs[0].count("rank 9 is dead") == 1, str(result)


def read_from_a_pipe(folder: str) -> None:
    """As a network disk that has gone would let a start wait."""
    said = threading.Event()
    real = tqdm.write

    def write(text: str, file: TextIO) -> None:
        real(text, file)
        said.set()

    tqdm.write = write
    watching = watch.Watch(process_group.start(), hang_timeout_s=1.0)
    pipe = Path(folder, "pipe")
    os.mkfifo(pipe)

    def answer() -> None:
        said.wait()
        pipe.write_text("content")

    threading.Thread(target=answer, daemon=True).start()
    manifest.looks_at(pipe)
    assert pipe.read_text() == "content"
    process_group.finish(watching._world.process)


def test_start_that_waits_for_a_file_names_it(tmp_path: Path) -> None:
    result = runner.spawn(read_from_a_pipe, [(str(tmp_path),)])
    assert result.ok, str(result)
    said = rf"warning: rank 0 \(.*\) has stood still for \d+ s so far; it looked at {tmp_path}/pipe last"
    assert re.search(said, result.outputs[0])


def fail_in_turn(folder: str) -> None:
    watching = start(folder)
    for noted in (watching.step, 1), (watching.note, "evaluation"), (watching.note, ""), (watching.step, 2):
        noted[0](noted[1])
        try:
            raise ArithmeticError(f"after {noted[1]!r}")
        except ArithmeticError as error:
            watching.report(error)
    watching.note("evaluation")
    watching.step(3)
    frame = sys._getframe()
    assert frame
    beats = watching._peers.num_beats
    runner.wait_for(lambda: watching._peers.num_beats >= beats + 2)
    sys.stderr.write(f"beat: {watching._peers.store.peek('watch/0')}\n")
    process_group.finish(watching._world.process)


def test_phase_that_was_noted(tmp_path: Path) -> None:
    """It holds until the next note or step."""
    result = runner.spawn(fail_in_turn, [(str(tmp_path / "run"),)])
    assert result.ok, str(result)
    failed = [line.partition("failed in ")[2] for line in result.outputs[0].splitlines() if "failed in " in line]
    assert failed == [
        "the main loop: ArithmeticError: after 1",
        "evaluation: ArithmeticError: after 'evaluation'",
        "the main loop: ArithmeticError: after ''",
        "the main loop: ArithmeticError: after 2",
    ]
    beat = result.outputs[0].partition("beat: ")[2]
    assert '"phase": "the main loop"' in beat, str(result)


def look_while_it_moves() -> None:
    """This thread looks at the main one from elsewhere, which is in another line each time."""
    world = process_group.start()
    heart = heartbeat.Heartbeat(world, float("inf"))
    seen: list[tuple[float, float]] = []

    def look() -> None:
        thread = threading.Thread(target=lambda: seen.append((heart.look()["stalled_s"], heart.spun_s)))
        thread.start()
        thread.join()

    for place in ("", "x", "xx"):
        exec(f"{place} = 1\nlook()" if place else "look()", {"look": look})  # another place in the code
    assert seen == [(0.0, 0.0), (0.0, heartbeat.BEAT_S), (0.0, 2 * heartbeat.BEAT_S)]
    for get_on in (
        lambda: setattr(heart, "step", 1),
        lambda: setattr(heart, "noted", "evaluation"),
        lambda: setattr(data.Loader, "batches_read", data.Loader.batches_read + 1),
        lambda: manifest.looks_at(Path("another file")),
    ):
        get_on()
        look()
        assert seen[-1][1] == 0.0
        look()
        assert seen[-1][1] == heartbeat.BEAT_S
    process_group.finish(world.process)


def test_moving_without_getting_on() -> None:
    """A step, a phase, a batch or a file is progress; another line is none."""
    result = runner.spawn(look_while_it_moves, [()])
    assert result.ok, str(result)


def look_at_processes() -> None:
    world = process_group.start()
    heart = heartbeat.Heartbeat(world, float("inf"))
    mine = heart.look()
    assert mine["pid"] == os.getpid()
    assert not heart.has_died(mine)
    other = subprocess.Popen(["sleep", "60"])
    beat = mine | {"pid": other.pid}
    assert not heart.has_died(beat)
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert heart.has_died(beat), "nobody has asked for its exit code yet"
    other.wait()
    assert heart.has_died(beat)
    for elsewhere in (mine["processes"] + "1", ""):
        assert not heart.has_died(beat | {"processes": elsewhere}), "another machine or container has other numbers"
    process_group.finish(world.process)


def test_end_of_a_process_is_seen_on_its_own_machine() -> None:
    result = runner.spawn(look_at_processes, [()])
    assert result.ok, str(result)


def look_at_limits() -> None:
    world = process_group.start()
    heart = heartbeat.Heartbeat(world, float("inf"))
    found = []
    for step in (0, 1, 2):
        if step:
            heart.begin(Path(), 0, 12.0)
            heart.step = step
        thread = threading.Thread(target=lambda: found.append(heart.look()["spins_s"]))
        thread.start()
        thread.join()
    assert found == [float("inf"), process_group.TIMEOUT_S, 24.0]
    process_group.finish(world.process)


def test_limits_of_a_rank_that_moves() -> None:
    """None before the training, patience in the first step, then twice --hang-timeout."""
    result = runner.spawn(look_at_limits, [()])
    assert result.ok, str(result)
