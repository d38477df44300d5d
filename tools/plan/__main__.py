"""Will it fit, and how fast will it be on N GPUs? `python -m tools.plan recipes/X --world-size N --hardware NAME`.

Runs the recipe's own code on tensors without data, counts what one step holds, computes and sends, and predicts memory,
time, and what failures will cost; with its own error. docs/plan.md explains what it knows and what it does not.

    python -m tools.plan recipes/fsdp_gpt --world-size 1024 --hardware h100-ib --num-layers 32 --width 4096
    python -m tools.plan recipes/fsdp_gpt --world-size 64 --tokens 1T --price 2.5      # days, GPU-hours, money
    python -m tools.plan recipes/fsdp_gpt --sweep                       # 1 to 65,536 ranks
    python -m tools.plan recipes/fsdp_gpt --sweep --world-size 64       # the layouts of 64 ranks
    python -m tools.plan --calibrate mine.toml                          # measure this machine
    python -m tools.plan --calibrate runs/a/b/metrics.jsonl --hardware h100-ib    # how far off is it for your runs?
    python -m tools.plan --calibrate mine.toml runs/prove/prove.json    # and write what fits them, for --hardware
    python -m tools.plan --html                                         # docs/explorer.html

All flags that are not of the planner are those of the recipe's train.py.
"""

import argparse
import dataclasses
import json
import math
import shlex
import sys
from pathlib import Path

from common import UserError
from tools import command
from tools.plan import advice, answer, sweep
from tools.plan.count import Case, count
from tools.plan.hardware import find, save, table
from tools.plan.predict import predict


def parser() -> argparse.ArgumentParser:
    """The planner's own flags."""
    made = argparse.ArgumentParser(
        prog="python -m tools.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("recipe", nargs="?", default="", help="a folder with a train.py, such as recipes/fsdp_gpt")
    made.add_argument("--world-size", type=int, default=None, help="number of ranks; 8 if nothing else is said")
    made.add_argument(
        "--hardware", default="h100-ib", help=f"{', '.join(table())}, or a file.toml; h100-ib if nothing is said"
    )
    made.add_argument("--accelerate-config", default="", help="for recipes/accelerate_gpt, a file of its configs/")
    made.add_argument("--tokens", default="", help="of the whole training, such as 300B or 1T: its days and GPU-hours")
    made.add_argument("--price", type=float, default=None, help="of a GPU's hour, with --tokens: what they cost")
    made.add_argument("--json", action="store_true", help="print everything that was counted and predicted, as JSON")
    made.add_argument("--sweep", action="store_true", help="1 to 65,536 ranks, or with --world-size its layouts")
    made.add_argument(
        "--calibrate",
        metavar="FILE",
        nargs="+",
        default=[],
        help="a file.toml alone: measure this machine, and write it there. Of your own runs, a metrics.jsonl, a "
        "prove.json or a CSV (recipe,flags,world_size,step_s): fit --hardware to them, say how much closer that gets, "
        "and write it to the file.toml that stands before them",
    )
    made.add_argument("--html", action="store_true", help="write docs/explorer.html")
    return made


def main(words: list[str]) -> None:
    """Answer one question."""
    args, flags = parser().parse_known_args(words)
    if flags and not args.recipe:
        raise UserError(f"{flags[0]} is not a flag of tools.plan, and no recipe's folder stands before it")
    if args.html:
        from tools.plan.explorer import write

        print(f"wrote {write()}")
    elif args.calibrate:
        first, *others = map(Path, args.calibrate)
        if first.suffix == ".toml" and not others:
            from tools.plan.calibrate import calibrate

            calibrate(first)
        else:
            of_runs(first if first.suffix == ".toml" else None, args)
    elif not args.recipe:
        raise UserError(
            "which recipe? Give a folder with a train.py, such as recipes/fsdp_gpt, or --html or --calibrate"
        )
    else:
        plan(args, flags)


def of_runs(target: Path | None, args: argparse.Namespace) -> None:
    """Fit to one's own runs, and write the machine, or print its fractions."""
    from tools.plan import own_runs

    files = map(Path, args.calibrate[1:] if target else args.calibrate)
    runs = [run for file in files for run in own_runs.read(file)]
    machine, text = own_runs.fitted(runs, find(args.hardware))
    print(text)
    if target:
        machine = dataclasses.replace(machine, name=target.stem)
        words = shlex.join(args.calibrate)
        save(machine, target, f"{args.hardware}, fitted by python -m tools.plan --calibrate {words}")
        print(f"wrote {target}: use --hardware {target}")
    else:
        print(own_runs.as_toml(machine))


def plan(args: argparse.Namespace, flags: list[str]) -> None:
    """Answer about one recipe."""
    machine = find(args.hardware)
    folder = sweep.folder_of(args.recipe)
    if not (folder / "train.py").exists():
        raise UserError(f"{args.recipe} has no train.py: give a folder such as recipes/fsdp_gpt")
    if args.world_size is not None and not 0 < args.world_size <= 2**20:
        raise UserError(f"--world-size {args.world_size} must be between 1 and {2**20:,}")
    price = 0.0 if args.price is None else args.price
    if args.price is not None and not (0 < price < math.inf and args.tokens):
        raise UserError(f"--price {price:g} must be above 0, and is of the hours that --tokens takes: give both")
    tokens = answer.number_of_tokens(args.tokens) if args.tokens else 0.0
    case = Case(folder, args.world_size or 8, tuple(flags), args.accelerate_config)
    if args.sweep:
        cases = list(sweep.layouts(case) if args.world_size else sweep.sizes(case))
        recipes = sorted({one.folder.name for one in cases})
        print(f"{len(cases)} layouts of {', '.join(recipes)}; each takes some seconds", file=sys.stderr)
        print(sweep.HEAD, flush=True)
        found = []
        for row in sweep.rows(cases, machine):
            found.append(row)
            print(sweep.line(row, machine), flush=True)
        print("\n".join(sweep.summary(found, machine)))
        if not any(row.found for row in found):
            raise UserError("none of these layouts can be")
        return
    works = count(case, machine)
    asked = predict(works, machine)
    fits = answer.fits(asked, machine)
    if not fits:
        print("it does not fit: trying other layouts, some seconds for each", file=sys.stderr, flush=True)
    advised = None if fits else advice.advise(case, asked, works[0].samples, machine)
    if args.json:
        given = answer.as_json(case, works, machine, tokens, price)
        print(json.dumps(given | ({} if fits else {"advice": advice.as_json(advised)}), indent=1))
    else:
        print(answer.as_text(case, works, machine, tokens, price))
        if not fits:
            print(f"{'advice':8}{advice.as_text(advised, case)}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        command.refuse(error)
