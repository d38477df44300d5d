"""The flags of the proofs, for `python -m tools.prove` and for the ranks."""

import dataclasses

from common import UserError
from common.bounds import NonNegativeFloat
from tools import about

PROOFS = ("equal", "moves", "kill", "stop", "rates", "collectives")


@dataclasses.dataclass(frozen=True)
class Args:
    """Prove on this world that every strategy trains alike, and measure it. Writes prove.md and prove.json."""

    out: str = "runs/prove"  # folder for the page, and for the logs beside it
    name: str = ""  # folder in --out; "" for --out itself
    recipes: tuple[str, ...] = ()  # the recipes to prove; none for all
    proofs: tuple[str, ...] = PROOFS  # which proofs to run
    minutes: NonNegativeFloat = 10.0  # what has not begun by then is not run, and the command fails
    timeout: NonNegativeFloat = 120.0  # seconds after which a run is killed, and has failed
    keep: bool = False  # keep the runs and their checkpoints, beside the page and the logs


def check(args: Args) -> None:
    """Refuse names of recipes and of proofs that there are not.

    Raises:
        UserError: names them, and those that there are.
    """
    for flag, given, known in (("recipes", args.recipes, about.trainings()), ("proofs", args.proofs, PROOFS)):
        if unknown := [name for name in given if name not in known]:
            raise UserError(f"--{flag} {' '.join(unknown)}: there is no such; there are {', '.join(known)}")
