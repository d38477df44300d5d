"""Copy a recipe into a project of your own, and later merge a newer Brigade into it: `python -m tools.copy`.

    python -m tools.copy recipes/ddp_resnet my_project
    python -m tools.copy --upgrade my_project                  # run in the newer checkout
    python -m tools.copy --upgrade my_project --dry-run        # only prints what it would do
    python -m tools.copy --upgrade my_project --from ../old    # of a copy that `cp -r` made: the checkout it came from

A copy keeps its original files in .brigade/, so an upgrade merges three ways and needs no old checkout. It loses no
line that you wrote: a conflict keeps both sides, between markers, and .brigade/ keeps your files as they were before.
Exit code: 0 for a clean upgrade, 1 where conflicts wait for you, 2 where nothing was done.
"""

import argparse
import sys
from pathlib import Path

from common import UserError
from tools.about import ROOT
from tools.copy import copying, upgrading

CONFLICTS, REFUSED, INTERRUPTED = 1, 2, 130  # exit codes


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(
        prog="python -m tools.copy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] RECIPE FOLDER | --upgrade FOLDER [--from CHECKOUT] [--recipe RECIPE] [--dry-run]",
        allow_abbrev=False,
    )
    made.add_argument("paths", nargs="*", metavar="RECIPE FOLDER", help="what to copy, and the folder to create")
    made.add_argument("--upgrade", metavar="FOLDER", type=Path, help="merge this checkout's files into a copy")
    made.add_argument(
        "--from",
        metavar="CHECKOUT",
        dest="origin",
        default="",
        help="what the copy was made from, if it has no record: an older checkout, or a commit or tag of this one",
    )
    made.add_argument("--recipe", default="", help="upgrade to this recipe; else to the one that the copy was made of")
    made.add_argument("--dry-run", action="store_true", help="print what an upgrade would do, and write nothing")
    return made


def main(words: list[str], root: Path = ROOT) -> int:
    """Copy or upgrade; returns the exit code.

    Args:
        words: the command line.
        root: the checkout whose files are copied or merged.
    """
    flags = parser()
    args = flags.parse_args(words)
    if args.upgrade is None and (args.origin or args.recipe or args.dry_run):
        flags.error("--from, --recipe and --dry-run belong to --upgrade FOLDER")
    if len(args.paths) != (2 if args.upgrade is None else 0):
        flags.error("name a recipe and the folder to create, or --upgrade and the folder of a copy")
    try:
        if args.upgrade is None:
            print(copying.copy(root, args.paths[0], Path(args.paths[1])))
            return 0
        done = upgrading.upgrade(root, args.upgrade, args.origin, args.recipe, args.dry_run)
        print(done.text)
        return CONFLICTS if done.conflicts else 0
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("interrupted: the same command again puts back what was written, and begins again", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
