"""Run a part of the checks, and note how long it took: by the clock, and on processors.

    python tests/timed.py --to times.jsonl pytest uv run pytest     # note the part "pytest", whose command follows
    python tests/timed.py --table times.jsonl                       # print all parts
    python -m tests.timed --page times.jsonl                        # and write all into docs/measured/tests.md

Without --page it needs the standard library alone, because the first part installs the rest. Processes that outlive
their parents, as fork servers and their ranks do, become this one's children, so that their processor time counts too.
"""

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
PAGE = Path(__file__).resolve().parents[1] / "docs/measured/tests.md"
WAIT_S = 30.0  # for processes that a part has left behind: fork servers end when their pipes do


def run(name: str, command: list[str], to: Path) -> int:
    """Run a command; append its name, seconds by the clock and of processors, and exit code as a line of JSON."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    began = time.monotonic()
    code = subprocess.run(command, check=False).returncode
    took_s = time.monotonic() - began
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if not pid:
            time.sleep(0.1)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    line = {"part": name, "took_s": took_s, "processor_s": used.ru_utime + used.ru_stime, "code": code}
    with to.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"ci: {_row(line)}", flush=True)
    return code


def _row(line: dict[str, Any]) -> str:
    failed = f", failed with {line['code']}" if line["code"] else ""
    return f"{line['part']}: {line['took_s']:,.0f} s, {line['processor_s']:,.0f} s of processors{failed}"


def table(lines: list[dict[str, Any]]) -> str:
    """The parts as a table of Markdown. Parts may run beside each other, so the clock's seconds do not add up."""
    rows = [f"| {one['part']} | {one['took_s']:,.0f} | {one['processor_s']:,.0f} |" for one in lines]
    total = f"| all parts | | {sum(one['processor_s'] for one in lines):,.0f} |"
    return "\n".join(["| part | s by the clock | s of processors |", "|---|---|---|", *rows, total])


def main() -> None:
    """Run a part, or show what parts took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--to", type=Path, help="file that gets a line of JSON for the part")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the parts of such a file")
    parser.add_argument("--page", type=Path, metavar="FILE", help="print them, and write docs/measured/tests.md")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="name of the part, and its command")
    args = parser.parse_args()
    if file := args.table or args.page:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        print(table(lines))
        if args.page:
            from tests.harness import pages  # needs what the first part installs

            pages.write(PAGE, measured=pages.measured("CI_PAGE=1 bash .ci/run", "gloo"), parts=table(lines))
        return
    name, *command = args.command
    sys.exit(run(name, command, args.to))


if __name__ == "__main__":
    main()
