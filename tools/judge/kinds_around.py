"""Kinds of mistakes in data, the group and devices."""

from tools.judge.kind import DDP, ERROR, NOTE, TRAIN, WARNING, Kind

KINDS = {
    # --- data
    "set_epoch is missing": Kind(
        ERROR,
        "DistributedSampler gives each epoch the same order: the same samples meet in the same batches.",
        "Call sampler.set_epoch(epoch) at the beginning of each epoch.",
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
    "environments with one seed": Kind(
        WARNING,
        "The environments of all ranks begin in the same states: less variety than it seems.",
        "Seed each environment by its number among those of all ranks, such as seed + rank * environments + i.",
        "recipes/syncbn_ppo/bare.py",
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
    "host wait in each step": Kind(
        NOTE,
        "The processor waits until the GPU has done all it was given, before it can give more.",
        "Add losses up on the GPU (total += loss.detach()), and read the sum when a line is printed.",
        TRAIN,
    ),
    "loaded onto GPU 0": Kind(
        WARNING,
        "Each rank loads the tensors to where they were saved from: all onto GPU 0.",
        'torch.load(path, map_location="cpu", weights_only=True)',
        DDP,
    ),
}
