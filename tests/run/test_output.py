"""A process whose output cannot be written ends as it would have, and keeps what it can."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from common.run import output

from tests.harness import runner

PRINTS = """
import sys
from pathlib import Path
from common.run import output
output.protect().spare = Path(sys.argv[1])
for line in ("first", "second \N{SNOWMAN}"):
    print(line)
print("to stderr", file=sys.stderr)
sys.exit(7)
"""


def run(
    spare: Path, stdout: int | None, shell: str = "", script: str = PRINTS, **environ: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, str(spare)]
    if shell:
        command = ["bash", "-c", f'exec "$@" {shell}', "bash", *command]
    return subprocess.run(
        command,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(runner.ROOT)} | environ,
        text=True,
        timeout=runner.HANG_S,
        check=False,
    )


def test_reader_that_has_left(tmp_path: Path) -> None:
    reader, pipe = os.pipe()
    os.close(reader)
    spare = tmp_path / "logs" / "rank_00000.log"
    result = run(spare, pipe)
    os.close(pipe)
    assert result.returncode == 7, "not 120, which is the interpreter's for a flush that fails"
    warning = f"warning: the output cannot be written (Broken pipe), which ends no training; what follows is in {spare}"
    assert result.stderr.splitlines() == [warning, "to stderr"], "once"
    assert spare.read_text().splitlines() == [warning, "first", "second \N{SNOWMAN}"]


@pytest.mark.parametrize("blocking", [True, False])
def test_reader_that_pauses(blocking: bool, tmp_path: Path) -> None:
    """As `less` and Ctrl-S do; and another program may have made the terminal non-blocking."""
    reader, pipe = os.pipe()
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, bytes(4096))
    os.set_blocking(pipe, blocking)
    result = run(tmp_path / "log", pipe)
    assert result.returncode == 7
    assert "cannot be written (nobody reads it)" in result.stderr
    assert "first\n" in (tmp_path / "log").read_text()
    os.close(pipe)
    os.close(reader)


def test_protected_again(tmp_path: Path) -> None:
    """What is kept goes where the newest one says: a process may run a second main, in another folder."""
    again = PRINTS.replace("output.protect()", "output.protect().spare = Path('/nowhere/log')\noutput.protect()")
    reader, pipe = os.pipe()
    os.close(reader)
    result = run(tmp_path / "log", pipe, script=again)
    os.close(pipe)
    assert result.returncode == 7
    assert (tmp_path / "log").read_text().splitlines()[1:] == ["first", "second \N{SNOWMAN}"]


def test_no_output_at_all(tmp_path: Path) -> None:
    result = run(tmp_path / "log", None, ">&- 2>&-")
    assert (result.returncode, result.stderr) == (7, "")


def test_characters_that_a_terminal_lacks(tmp_path: Path) -> None:
    result = run(tmp_path / "log", subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert result.returncode == 7
    assert result.stdout.splitlines() == ["first", r"second \u2603"]


def write_log(log: str, other: str) -> None:
    output.redirect(Path(log) / "x.log")
    print("printed")
    output.redirect(Path(other))


def test_log_that_cannot_be_opened(tmp_path: Path) -> None:
    """The rank prints where it has printed so far."""
    (tmp_path / "file").touch()
    result = runner.spawn(write_log, [(str(tmp_path / "file"), str(tmp_path / "logs" / "good.log"))])
    assert result.ok
    first, second = result.outputs[0].splitlines()
    assert first.startswith(f"warning: {tmp_path}/file/x.log cannot be opened, so this rank prints to the terminal: ")
    assert second == "printed"
    assert (tmp_path / "logs" / "good.log").read_text().startswith("--- 2")


def follow(log: str) -> None:
    output.redirect(Path(log))
    here = output.Output()
    here.spare = Path(log)
    here.keep(b"kept", "no reason")
    print("printed")


def test_log_that_is_a_link(tmp_path: Path) -> None:
    """A file elsewhere, perhaps of another user, gets nothing of it; a run prints where it has printed so far."""
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "rank_00001.log").symlink_to(tmp_path / "mine")
    result = runner.spawn(follow, [(str(tmp_path / "rank_00001.log"),)])
    assert result.ok
    assert "rank_00001.log cannot be opened, so this rank prints to the terminal: " in result.outputs[0]
    assert "printed\n" in result.outputs[0]
    assert (tmp_path / "mine").read_text() == "precious"
