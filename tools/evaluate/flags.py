"""The flags of `python -m tools.evaluate`."""

import dataclasses
from typing import Literal

import tyro


@dataclasses.dataclass(frozen=True)
class Args:
    """Evaluate a run's checkpoint on one device, a GPU if there is one, in one process without a strategy."""

    run: tyro.conf.Positional[str]  # the run's folder, here or on s3://
    checkpoint: str = ""  # a step, or "best" for the one that --keep-best has kept; "" for the newest undamaged one
    ema: bool = False  # evaluate the average of the weights that a training with --ema keeps
    data: str = ""  # another data set, as for the recipe's --data; "" for the run's own
    split: Literal["validation", "test"] = "validation"  # which split of the data set to evaluate
    recipe: str = ""  # the train.py to take section 2 from; "" for recipes/<the run's recipe>/train.py
    out: str = ""  # also write a row per sample to this .parquet file; each passes alone, so not for a loss over pairs
