"""Kinds of mistakes in models, optimizers, losses and rates."""

from tools.judge.kind import ACCUMULATE, BY_HAND, DDP, ERROR, FSDP, NOTE, TRAIN, WARNING, Kind

KINDS = {
    # --- models that train apart
    "never wrapped": Kind(
        ERROR,
        "Each process trains a model of its own on its part of the data; what is saved is one of them.",
        "Wrap the model: DistributedDataParallel(model), before the optimizer is made.",
        DDP,
    ),
    "around the wrapper": Kind(
        ERROR,
        "DDP does not see this forward pass and sends no gradients: the replicas drift apart.",
        "Call the wrapped model, not its .module, in training.",
        DDP,
    ),
    "replicas differ": Kind(
        ERROR,
        "The ranks hold different weights: their gradients belong to other models, and one of these is saved.",
        "Send rank 0's weights to all before the first step, and the mean gradient before each step.",
        BY_HAND,
    ),
    "different initial weights": Kind(
        ERROR,
        "The ranks begin with other weights. The same gradients move them alike, so they never come together.",
        "Broadcast rank 0's parameters and buffers once, or seed all ranks alike before the model is made.",
        BY_HAND,
    ),
    "buffers not synchronised": Kind(
        WARNING,
        "BatchNorm's running statistics are each rank's own: what is saved has seen the samples of one rank.",
        "Leave DDP's broadcast_buffers on, use SyncBatchNorm, or broadcast the buffers before evaluation and saves.",
        BY_HAND,
    ),
    "samples depend on each other": Kind(
        NOTE,
        "A sample's result depends on the others in its batch, which are its rank's: two processes with half of the "
        "batch each train something else than one.",
        "Take such statistics over all ranks (all_gather or all_reduce), or for each sample.",
        "recipes/syncbn_ppo/train.py",
    ),
    "nothing is sent": Kind(
        ERROR,
        "All micro-batches of the step run under no_sync, also the last one. Without a gradient, replicas drift apart.",
        "Leave no_sync for the last micro-batch of each step.",
        ACCUMULATE,
    ),
    "sent in each micro-batch": Kind(
        WARNING,
        "DDP sends all gradients in every micro-batch: the same result, for several times the traffic.",
        "Run all micro-batches of a step but the last under model.no_sync().",
        ACCUMULATE,
    ),
    "gradients averaged twice": Kind(
        ERROR,
        "DDP has averaged these gradients in backward. Another all-reduce sends them again, and a division by the "
        "number of ranks makes them too small.",
        "Remove the all-reduce of gradients, or DDP.",
        DDP,
    ),
    "sum of gradients": Kind(
        ERROR,
        "The gradient is the sum over the ranks of means: each step is as many times too long as there are ranks.",
        "Divide by the number of ranks after the all-reduce (or ReduceOp.AVG).",
        BY_HAND,
    ),
    "rank written down": Kind(
        ERROR,
        "All processes call themselves the same rank. They wait for one another until a timeout, or one fails.",
        "init_process_group(backend) without rank and world_size: torchrun has set RANK and WORLD_SIZE.",
        DDP,
    ),
    "replicas as threads": Kind(
        WARNING,
        "nn.DataParallel in each of several processes: every process drives all GPUs, and nothing joins the processes.",
        "Use DistributedDataParallel, one process per GPU.",
        DDP,
    ),
    # --- optimizer
    "optimizer of other parameters": Kind(
        ERROR,
        "The optimizer holds tensors that the model no longer uses: it never changes the weights.",
        "Make the optimizer after fully_shard (or after whatever replaces the parameters).",
        FSDP,
    ),
    "parameters without optimizer": Kind(
        ERROR,
        "These parameters get gradients, and no optimizer changes them.",
        "Give them to the optimizer, or set requires_grad_(False).",
        TRAIN,
    ),
    "parameters without gradient": Kind(
        WARNING,
        "The loss does not depend on them: they never change. DDP fails in its second step, or searches for "
        "them in each.",
        "Use them in forward, or remove them.",
        TRAIN,
    ),
    "optimizer made again": Kind(
        WARNING,
        "A new optimizer for the same parameters begins without momentum and averages.",
        "Make it once, before the loop.",
        DDP,
    ),
    "no backward": Kind(ERROR, "The step has no new gradient to use.", "Call loss.backward() before the step.", DDP),
    "zero_grad is missing": Kind(
        ERROR,
        "Gradients of earlier steps are still there and are added: the step is along the sum of all so far.",
        "Call optimizer.zero_grad() once per step.",
        DDP,
    ),
    "zero_grad before the step": Kind(
        ERROR,
        "The gradients are gone when the optimizer reads them: nothing is learned.",
        "The order is zero_grad, backward, step.",
        DDP,
    ),
    "clip before unscale": Kind(
        ERROR,
        "The gradients are still multiplied by the loss scale: the norm is thousands of times too large, and "
        "each gradient is cut to almost nothing.",
        "Call scaler.unscale_(optimizer) before the clip.",
        TRAIN,
    ),
    "clip of local gradients": Kind(
        WARNING,
        "Each rank cuts by the norm of its own gradient, before the mean is taken: ranks count with different weights.",
        "Clip after the all-reduce.",
        BY_HAND,
    ),
    "clip after the step": Kind(
        ERROR, "The step has already used the gradients: nothing is clipped.", "Clip between backward and step.", TRAIN
    ),
    "accumulation not divided": Kind(
        WARNING,
        "The gradient is a sum of the micro-batches' means: a step is as many times too long as there are of them.",
        "Divide each loss by the number of micro-batches, or sums by the count of the whole step.",
        ACCUMULATE,
    ),
    "mean of means": Kind(
        WARNING,
        "Means over different counts are averaged as if they were alike: what stands in a small one counts more.",
        "Divide sums by the count of the whole step over all micro-batches and ranks.",
        "recipes/ddp_gpt/train.py",
    ),
    "shapes that broadcast": Kind(
        ERROR,
        "torch broadcasts output and target to a matrix: the loss compares every sample with every other one.",
        "Give both one shape: output.squeeze(-1) or target.unsqueeze(-1).",
        TRAIN,
    ),
    # --- rates
    "schedule per micro-batch": Kind(
        WARNING,
        "The schedule runs several times as fast as the training.",
        "Call scheduler.step() once after optimizer.step().",
        TRAIN,
    ),
    "schedule before the step": Kind(
        WARNING,
        "The first value of the schedule is skipped.",
        "Call scheduler.step() after optimizer.step().",
        TRAIN,
    ),
    "schedule never stepped": Kind(
        WARNING, "The learning rate stays as it began.", "Call scheduler.step() once per step or per epoch.", TRAIN
    ),
    "rate scaled without batch": Kind(
        WARNING,
        "Two processes read as many samples per step as one, and the rate grows with the number of processes.",
        "Scale the rate by the samples of a step, not by the number of ranks.",
        ACCUMULATE,
    ),
    "rate scaled twice": Kind(
        WARNING,
        "The rate grows faster than the batch.",
        "Multiply the rate by (samples of a step) / (samples that it was chosen for), once.",
        ACCUMULATE,
    ),
    "rate not scaled": Kind(
        NOTE,
        "Two processes read twice the samples in a step at the same rate: the same training takes other steps.",
        "If the rate was chosen for one process, scale it with the batch and warm up, or divide the batch.",
        TRAIN,
    ),
}
