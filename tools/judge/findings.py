"""The kinds of mistakes: what each does to a training, what to change, and the recipe that does it right."""

from dataclasses import dataclass, field

ERROR, WARNING, NOTE = "error", "warning", "note"


@dataclass(frozen=True)
class Kind:
    """One kind of mistake."""

    level: str
    does: str
    change: str
    recipe: str


@dataclass(frozen=True)
class Finding:
    """A mistake of a script: its kind, the line, and what was seen."""

    kind: str
    at: str
    evidence: str
    sizes: dict[str, float] = field(default_factory=dict)

    @property
    def about(self) -> Kind:
        """What is said of the kind."""
        return KINDS[self.kind]


DDP = "recipes/ddp_resnet/bare.py"
ACCUMULATE = "recipes/multinode_resnet/bare.py"
BY_HAND = "recipes/allreduce_resnet/bare.py"
FSDP = "recipes/fsdp_gpt/bare.py"
TRAIN = "recipes/ddp_resnet/train.py"

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
    # --- data
    "set_epoch is missing": Kind(
        ERROR,
        "DistributedSampler gives each epoch the same order: the same samples meet in the same batches.",
        "Call sampler.set_epoch(epoch) at the begin of each epoch.",
        DDP,
    ),
    "same samples on all ranks": Kind(
        ERROR,
        "All ranks read the same batches: as many processes do the work of one.",
        "Give the loader a DistributedSampler, or take every N-th sample.",
        DDP,
    ),
    "samples lost": Kind(
        ERROR,
        "No rank ever reads these samples.",
        "Split once: a DistributedSampler over the whole data set, or own parts without it.",
        TRAIN,
    ),
    "samples twice": Kind(
        WARNING,
        "Samples are read more than once in an epoch, so they count more.",
        "Let the parts of the ranks not overlap.",
        TRAIN,
    ),
    "evaluation counts duplicates": Kind(
        WARNING,
        "DistributedSampler repeats samples until the ranks have equally many: they count twice in the result.",
        "Give rank r the samples r, r + N, ... of the set without repetition, and add up sums and counts.",
        TRAIN,
    ),
    "uneven batches": Kind(
        ERROR,
        "One rank has more batches than another. It waits in a collective that the other one never calls.",
        "Give all ranks equally many batches, or wrap the loop in model.join().",
        TRAIN,
    ),
    "same augmentation": Kind(
        NOTE,
        "All ranks augment with the same random numbers: less variety than it seems.",
        "Seed with seed + rank after the model is made, or by the index of the sample.",
        TRAIN,
    ),
    "same dropout": Kind(
        NOTE,
        "All ranks drop the same units: the noise of dropout is not averaged.",
        "Seed with seed + rank after the model is made.",
        TRAIN,
    ),
    "batch statistics per rank": Kind(
        WARNING,
        "BatchNorm takes mean and variance over the few samples of one rank.",
        "Wrap: SyncBatchNorm.convert_sync_batchnorm(model), before DDP; or use GroupNorm.",
        TRAIN,
    ),
    # --- the group
    "not all ranks come": Kind(
        ERROR,
        "Ranks wait for one another at different lines. On GPUs, the job hangs until NCCL's timeout.",
        "All ranks must call the same collectives in the same order, forward and backward of DDP included.",
        DDP,
    ),
    "local loss logged": Kind(
        WARNING,
        "The log shows the loss of one rank's samples and calls it the loss.",
        "all_reduce a detached copy, and divide by the number of ranks.",
        DDP,
    ),
    "group left open": Kind(
        NOTE,
        "torch warns, and a process of NCCL may hang at exit.",
        "Call dist.destroy_process_group() at the end.",
        DDP,
    ),
    "gloo between GPUs": Kind(
        WARNING,
        "The backend gloo sends tensors of GPUs through the host's memory.",
        'Use backend="nccl" where the model is on GPUs.',
        DDP,
    ),
    "no torch.distributed": Kind(
        NOTE,
        "Each process trains the whole, alone. The rest of this verdict is about one process.",
        "The README's first recipes show what changes: python -m tools.lesson dp_resnet ddp_resnet.",
        DDP,
    ),
    # --- devices
    "wrapped before moved": Kind(
        WARNING,
        "DDP was made for the model on the CPU, and the model moved afterwards.",
        "Move first: DistributedDataParallel(model.to(device)).",
        DDP,
    ),
    "rank as device": Kind(
        ERROR,
        "The rank is the number of the GPU: on the second machine there is no such GPU.",
        'Use int(os.environ["LOCAL_RANK"]).',
        DDP,
    ),
    "all on GPU 0": Kind(
        ERROR,
        "Every process works on GPU 0, or takes memory there.",
        'Call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) first, and use that device everywhere.',
        DDP,
    ),
    "no such device": Kind(
        ERROR,
        "The number of the GPU is negative: torchrun passes no --local_rank, so its default is used.",
        'Use int(os.environ["LOCAL_RANK"]).',
        DDP,
    ),
    "GPU without a question": Kind(
        NOTE,
        "The script fails on a machine without a GPU.",
        'device = torch.device("cuda" if torch.cuda.is_available() else "cpu", ...)',
        DDP,
    ),
    "loaded onto GPU 0": Kind(
        WARNING,
        "Each rank loads the tensors to where they were saved from: all onto GPU 0.",
        'torch.load(path, map_location="cpu", weights_only=True)',
        DDP,
    ),
    # --- files
    "saved by all ranks": Kind(
        ERROR,
        "All ranks write one file at the same time: it may be torn.",
        "Let rank 0 write, into a file beside it, and rename that.",
        DDP,
    ),
    "checkpoint lacks the optimizer": Kind(
        WARNING,
        "A resume begins without momentum and averages: the loss has a bump there.",
        "Save optimizer.state_dict() as well, and load it.",
        DDP,
    ),
    "checkpoint lacks the schedule": Kind(
        WARNING, "A resume begins the schedule again.", "Save scheduler.state_dict() as well, and load it.", TRAIN
    ),
    "checkpoint lacks the scaler": Kind(
        NOTE,
        "A resume begins with another loss scale and skips some steps.",
        "Save scaler.state_dict() as well, and load it.",
        TRAIN,
    ),
    "names of the wrapper": Kind(
        NOTE,
        'The names begin with "module.": a plain model of the same kind refuses the file.',
        "Save model.module.state_dict().",
        DDP,
    ),
    "pickle is trusted": Kind(
        WARNING,
        "weights_only=False runs whatever program the file contains.",
        "torch.load(path, weights_only=True), and save tensors and plain values only.",
        DDP,
    ),
    "resume repeats an epoch": Kind(
        WARNING,
        "The continued run reads an epoch again that was done.",
        "Save epoch + 1, the number of the next one.",
        DDP,
    ),
    "resume without optimizer state": Kind(
        WARNING,
        "The continued run begins without momentum and averages.",
        "Load what the optimizer had: optimizer.load_state_dict(...).",
        DDP,
    ),
    "resume at another rate": Kind(
        WARNING,
        "The continued run trains at another rate than the one it continues.",
        "Load the schedule's state.",
        TRAIN,
    ),
}
