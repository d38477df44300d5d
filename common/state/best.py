"""Which evaluation is the best so far, and when nothing better comes: --keep-best and --patience."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import UserError, ranks
from common.run import run_dir
from common.train import metrics


class Best:
    """The evaluations of a run, also of before it has resumed.

    Attributes:
        step: of the evaluation with the best metric of --keep-best, whose checkpoint is to be kept; -1 for none.
    """

    def __init__(self, flags: Mapping[str, Any], path: Path, last_step: int) -> None:
        """Read what the run has recorded (all ranks).

        Args:
            flags: the recipe's. "keep_best": a metric of the evaluations; "" to keep no checkpoint for it. "patience":
                evaluations without a better metric (without "keep_best", the loss) that end the run; 0 for none. A
                recipe that trains nothing has neither.
            path: the run's folder.
            last_step: the step that it continues after.
        """
        self.step = -1
        self._keep_best = flags.get("keep_best", "")
        self._patience = flags.get("patience", 0)
        self._tag = f"val/{self._keep_best or 'loss'}"
        if self._keep_best and not metrics.LOWER.search(self._tag):
            ranks.print0(
                f"--keep-best {self._keep_best}: higher is better, as its name does not end like a loss or error"
            )
        self._evaluations = ranks.from_rank0(
            lambda: [one for one in run_dir.records(path) if self._tag in one and one["step"] <= last_step], path
        )

    def add(self, step: int, means: Mapping[str, float]) -> str:
        """Note an evaluation; returns why --patience ends the run, "" if it does not.

        Raises:
            UserError: --keep-best names none of its metrics.
        """
        if not self._keep_best and not self._patience:
            return ""
        metric = self._tag.removeprefix("val/")
        if metric not in means:
            flag = f"--keep-best {metric}" if self._keep_best else f"--patience {self._patience}"
            raise UserError(f"{flag}: an evaluation gives {', '.join(means)}; name one of them with --keep-best")
        self._evaluations.append({"step": step, self._tag: means[metric]})
        value, best_step = metrics.best(self._evaluations).get(self._tag, (math.nan, 0))
        if self._keep_best and best_step == step:
            self.step = step
        since = sum(one["step"] > best_step for one in self._evaluations)
        if not since >= self._patience > 0:
            return ""
        best = f"best {value:.4g} at step {best_step}"
        return f"--patience {self._patience}: no better {self._tag} for {since} evaluations, {best}"
