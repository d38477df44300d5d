"""Learning rate as a pure function of the step, so there is no scheduler state to save."""

import math

import torch


def linear_scaling(lr: float, global_batch_size: int, reference_batch: int) -> float:
    """Scale a learning rate from the batch size that it was chosen for to another.

    "When the minibatch size is multiplied by k, multiply the learning rate by k"
    (Goyal et al. 2017, section 2.1, https://arxiv.org/abs/1706.02677).

    Args:
        lr: the rate at `reference_batch` samples per optimizer step.
        global_batch_size: samples per optimizer step, over all ranks.
        reference_batch: the number of samples per step that `lr` was chosen for.
    """
    return lr * global_batch_size / reference_batch


def warmup_cosine(step: int, warmup_steps: int, max_steps: int) -> float:
    """Factor on the peak rate for a step, in (0, 1].

    Linear warm-up, then a half cosine towards 0. Goyal et al. (2017, section 2.2) warm up from the unscaled rate; this
    warm-up starts from 0, because it also serves batches smaller than the reference. The cosine is that of Loshchilov
    and Hutter (2017, https://arxiv.org/abs/1608.03983), without restarts.

    Args:
        step: steps already done; 0 for the first step.
        warmup_steps: the factor reaches 1 at this step.
        max_steps: length of the whole training.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, max_steps - warmup_steps)))


def scale_rates(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Set each parameter group's rate to `factor` times its initial rate; returns the first group's rate."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group.setdefault("initial_lr", group["lr"])  # torch's schedulers store it there too
    return optimizer.param_groups[0]["lr"]
