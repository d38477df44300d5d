"""The proofs of this world's ranks, and its figures: `python -m tools.prove`, or launch/slurm.sh tools/prove.

Each rank starts one process after the other, each of which is one rank of one run of a recipe as it stands. Rank 0
compares what the runs have written. See docs/prove.md.
"""

import dataclasses
import os
import shutil
import signal
import time
from pathlib import Path

from common import UserError, ranks
from common.protect import watch
from common.run import cli, exits, process_group
from common.run.process import Process
from tools import about
from tools.prove import flags, page, proofs, world


@exits.entry
def main(process: Process) -> None:
    """Run all proofs and write the page.

    Raises:
        UserError: a proof has failed, or was not reached in time.
    """
    args = cli.parse(flags.Args)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, exits.HELD_BACK)  # there is nothing to save
    flags.check(args)
    run_key = os.environ.get("RUN_KEY", "")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these ranks only start others, which get the GPUs
    place = process_group.start("gloo", process=process)
    ranks.check_same(flag=dataclasses.asdict(args), version=ranks.versions())
    process.watch = watch.Watch(place)
    gpus = bool(ranks.env_int("GPUS_ON_NODE", default=0)) and visible not in ("", "-1")
    out = Path(ranks.from_rank0(lambda: str((Path(args.out).expanduser() / args.name).resolve())))
    folder = Path(ranks.from_rank0(lambda: str(out / time.strftime("%Y%m%d-%H%M%S"))))
    began = time.monotonic()

    def run(job: world.Job) -> world.Outcome | None:
        """Run a job while there is time (all ranks)."""
        if ranks.from_rank0(lambda: time.monotonic() - began > 60 * args.minutes):
            return None
        ranks.print0(f"{time.monotonic() - began:5.0f} s  {job.name}")
        return world.run(dataclasses.replace(job, timeout_s=args.timeout), run_key, visible)

    asked = proofs.Asked(args.recipes or tuple(about.trainings()), args.proofs, place.size, gpus, folder)
    rows, figures = proofs.all_of(asked, run)
    shutil.rmtree(folder / "runs", ignore_errors=True) if place.rank == 0 and not args.keep else None
    where = page.machine(place.size, folder)
    told = ranks.from_rank0(lambda: page.write(out, rows, figures, where))
    verdicts = [row.verdict for row in rows if not row.needs]
    if set(verdicts) != {"passed"}:
        raise UserError(f"{told} (--minutes {args.minutes:g} ends the time)")
    ranks.print0(told)
    process_group.finish(process)


if __name__ == "__main__":
    main()
