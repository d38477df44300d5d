"""Judge a training script of any origin: `python -m tools.judge [--json] path/to/train.py [the script's flags]`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

COULD_NOT_RUN = 2
ABOUT = """Run a training script for a few steps on two processes of this machine, without a GPU, and name mistakes that
raise no error by line. Flags of this tool stand before the script; all that follows the script is the script's own."""


def make_parser() -> argparse.ArgumentParser:
    """This tool's flags, the script, and the script's flags."""
    parser = argparse.ArgumentParser(prog="python -m tools.judge", description=ABOUT, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the verdict as a page for a browser as well")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps after which epochs are cut short")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that one run of the script may take")
    parser.add_argument("--memory", type=float, default=8.0, help="GiB that all processes of one run may hold")
    parser.add_argument("--no-gpu", action="store_true", help="answer torch.cuda.is_available() with False")
    parser.add_argument("--once", action="store_true", help="two processes only: no run on one, no resume")
    parser.add_argument("script", nargs="?", type=Path, help="the training script")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="what the script is started with")
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = make_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"no flag of this tool: {unknown[0]}")
    if args.script is None:
        parser.error("which script? python -m tools.judge path/to/train.py")
    if not args.script.is_file():
        parser.error(f"{args.script} is not a file")
    if args.html is not None and not args.html.absolute().parent.is_dir():
        parser.error(f"--html {args.html}: the folder {args.html.parent} is not there")
    if min(args.steps, args.timeout, args.memory) <= 0:
        parser.error("--steps, --timeout and --memory must be more than 0")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Judge the script, print the verdict, and return the exit code."""
    args = parse(argv)
    from tools.judge import report, show, verdict  # these need torch

    result = verdict.judge(verdict.Asked.of(args))
    print(report.as_json(result) if args.json else report.as_text(result))
    if args.html is not None:
        args.html.write_text(show.page(result), encoding="utf-8")
        print(f"wrote {args.html}", file=sys.stderr)
    return result.code


if __name__ == "__main__":
    sys.exit(main())
