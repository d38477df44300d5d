"""Where the time of a step goes: `python -m tools.profile RUN` reads what a run with `--profile N` has written."""

import tyro

from common import UserError
from tools import command
from tools.command import Source


def main(path: Source, step: int = 0, merge_ranks: int = 8, json: bool = False) -> None:
    """Show where the time of profiled steps went, and write the ranks' traces as one, merged.json.gz.

    Args:
        path: the folder of a run that was trained with --profile, or one in its profile/.
        step: the profile that begins with this step; 0 for the last one.
        merge_ranks: most ranks in merged.json.gz, which a browser must load; 0 writes none.
        json: print everything that was found, as JSON; times are seconds.
    """
    from tools.profile import table

    table.show(path, step, merge_ranks, json)


if __name__ == "__main__":
    with command.one_process():
        try:
            tyro.cli(main, prog="python -m tools.profile")
        except UserError as error:
            command.refuse(error)
