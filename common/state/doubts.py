"""Steps whose numbers may be wrong: a run computes them again from its newest checkpoint, if the user wants that."""

from pathlib import Path

import torch.distributed as dist

from common import BadStateError, ranks
from common.run import run_dir

SPIKE = 10  # times the largest loss so far, as Megatron-Core's rerun state machine has it


class Doubts:
    """Decides whether a step is computed again, which shows whether its fault was a passing one.

    A run computes the same again, on some devices up to rounding. So a result that is right the second time was a
    fault of a device or of its memory, and one that is wrong again is not.
    """

    def __init__(self, on_bad_state: str) -> None:
        """Begin; a run that went back keeps its doubts.

        Args:
            on_bad_state: the flag: "rewind" to compute a step again, "stop" for never.
        """
        self._rewinds = on_bad_state == "rewind"
        self._largest: list[tuple[int, float]] = []  # up to each step that was logged
        self._went_back_from = 0  # the newest step with a bad state
        self._suspect = 0

    def check_loss(self, step: int, loss: float) -> None:
        """Notice a loss that is far larger than each before (all ranks).

        Raises:
            BadStateError: as `suspect`.
        """
        while self._largest and self._largest[-1][0] >= step:  # of before it went back
            self._largest.pop()
        largest = self._largest[-1][1] if self._largest else 0.0
        if loss > SPIKE * largest > 0:
            self.suspect(step, f"the loss was over {SPIKE} times the largest before")
        self._largest.append((step, max(largest, loss)))  # in this order, NaN counts for nothing

    def suspect(self, step: int, reason: str) -> None:
        """A step is suspicious, but its numbers may be right: with --on-bad-state rewind, it is computed again, once.

        Raises:
            BadStateError: compute it again.
        """
        if step <= self._went_back_from:
            ranks.print0(f"note: {reason} in step {step} again: this is no passing fault")
            self._suspect = 0
        elif self._rewinds:
            raise BadStateError(f"{reason} in step {step}", step)

    def confirm(self, step: int, last: bool) -> None:
        """A checkpoint of a step was kept: the suspicious step before it is right now."""
        if self._suspect and (step > self._suspect or last):
            ranks.print0(f"step {self._suspect} was computed again, without the fault: it was a passing one")
            self._suspect = 0

    def judge(self, error: BadStateError, path: Path) -> None:
        """Let the run go back for a bad state (all ranks).

        Args:
            error: the bad state.
            path: the run's folder.

        Raises:
            BadStateError: it must not, because the user does not want it or because it did so before; says how to
                continue.
        """
        if not self._rewinds or error.step <= self._went_back_from:
            again = "; this is no passing fault, because the run went back from there before"
            command = run_dir.resume_command(path, dist.get_world_size())
            raise BadStateError(
                f"{error}{again * bool(self._went_back_from)}; to continue from the newest checkpoint, run: {command}",
                error.step,
            ) from None
        self._went_back_from = self._suspect = error.step
        ranks.print0(f"warning: {error}; going back to the newest checkpoint (--on-bad-state rewind)")
