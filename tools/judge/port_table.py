"""What `--port` knows: the strategies, and where the parts of a script go. A test looks each name up in the recipes."""

from dataclasses import dataclass

TOKENS = r"^(nn\.)?Embedding$|[Tt]okenizer|CausalLM|^lm_head$|vocab|^GPT|^gpt|Llama"  # a name that means text
EVALUATES = (
    r"\.eval\(\)|def \w*(eval|valid|test|estimate|predict)\w*(?s:.*)(no_grad|inference_mode)"  # a function that does
)
TRAINS = r"backward\(|[Oo]ptim|init_process_group"  # and does not this
MODEL = r"(\w*_)?(model|net|network|agent|policy|backbone|unet|actor|critic|generator|discriminator)"


@dataclass(frozen=True)
class Strategy:
    """A strategy: the first words of its recipes' names, what is said of a script that has it, and by what it shows.

    Attributes:
        seen: what a run shows (`port_seen.traits`).
        names: a pattern of a name in the script, for a script that did not come to a step.
        always: the names count for every script: no run shows this.
    """

    strategy: str
    reason: str
    seen: str = ""
    names: str = ""
    always: bool = False


# The first that fits.
STRATEGIES = (
    Strategy("syncbn", "it steps environments", "", r"gym|gymnasium|envpool|pufferlib|advantages?|rollouts?", True),
    Strategy("pipeline", "its layers lie on several ranks", "", r"torch\.distributed\.pipelining|PipelineStage", True),
    Strategy("moe", "it has experts", "", r"(?i)\w*(experts?|moe)(_?(layer|block|parallel|mlp|ffn))?", True),
    Strategy("context", "it splits sequences", "", r"(?i)context_parallel|ring_\w*attention|\w*ulysses\w*", True),
    Strategy("context", "parts of an input lie on several ranks", "exchange within a forward"),
    Strategy("accelerate", "it is a training in Accelerate", "", r"accelerate|Accelerator", True),
    Strategy("tensor", "its matrices are split", "tensor parallel", r"parallelize_module|\w*ColwiseParallel"),
    Strategy("fsdp", "its tensors are split", "fully_shard", r"fully_shard|FullyShardedDataParallel|FSDP"),
    Strategy("fsdp", "the optimizer's state is split", "sharded optimizer", r"ZeroRedundancyOptimizer"),
    Strategy("diloco", "the ranks train apart, and meet after several steps", "weights now and then"),
    Strategy("multinode", "DDP that sends once for several micro-batches", "accumulation", r"no_sync"),
    Strategy("ddp", "DistributedDataParallel", "DDP", r"DistributedDataParallel|DDP"),
    Strategy("allreduce", "its gradients are sent by hand", "gradients by hand", r"all_reduce"),
    Strategy("dp", "nn.DataParallel", "DataParallel", r"DataParallel"),
    Strategy("ddp", "the recipe for one process and for several"),
)


@dataclass(frozen=True)
class Place:
    """A part of a script, and where it goes.

    Attributes:
        what: the part.
        pattern: of what `port.heads` says of a node.
        into: functions and flags of train.py; the first that a recipe has takes it.
        how: what changes on the way.
        whole: nothing within is looked at.
    """

    what: str
    pattern: str
    into: tuple[str, ...]
    how: str = ""
    whole: bool = True


LEFT = "already there"
PLACES = (
    Place("flags", r"^call \S*(add_argument|click\.option)\(.*['\"]--", ()),
    Place("the stream", r"^class .*IterableDataset", ("make_data", "make_envs"), "in a dataset.IterableStyle"),
    Place("the data set", r"^class .*(Dataset|DataModule)\b.*\)", ("make_data", "make_envs"), "in a dataset.MapStyle"),
    Place("training_step", r"^def (training_step|compute_loss)", ("forward",), "sums and counts, no mean"),
    Place("its optimizers", r"^def (configure_optimizers|create_optimizer\w*)", ("make_optimizer",), "", False),
    Place("its loaders", r"^def (train|val|test)_dataloader", ("make_data", "make_envs"), "the data set alone"),
    Place("the evaluation", r"^def .* evaluates$|^def validation_step", ("evaluate",), "its sums come from forward"),
    Place(
        "the Trainer's arguments",
        r"^call \S*(Trainer|TrainingArguments|SFTConfig)\(|= \S*(Trainer|TrainingArguments)\(",
        ("Args",),
    ),
    Place("the model", r"^class .*Module\)", ("make_model",), "", False),
    Place(
        "process group and devices",
        r"^call \S*(init_process_group|destroy_process_group|set_device|barrier|spawn|device_count|init_device_mesh)\(",
        ("main",),
        LEFT,
    ),
    Place(
        "the model and its wrapper",
        rf"^(self\.)?{MODEL} = (DistributedDataParallel|DDP|FSDP|FullyShardedDataParallel)\((nn|[\w.]+\()",
        ("make_model",),
        "plain; parallelize wraps it",
    ),
    Place(
        "what wraps the model",
        r"(DistributedDataParallel|\bDDP|\bFSDP|FullyShardedDataParallel|fully_shard|parallelize_module|DataParallel"
        r"|\.prepare|convert_sync_batchnorm)\(",
        ("parallelize",),
        LEFT,
    ),
    Place("torch.compile", r"torch\.compile\(", ("--compile",)),
    Place("average of the weights", r"AveragedModel\(|^(\w*_)?ema = ", ("--ema",)),
    Place(
        "the data set",
        r"(Dataset|ImageFolder|CIFAR\d+|load_dataset|make_data)\(",
        ("make_data", "make_envs"),
        "in a dataset.MapStyle, or --data",
    ),
    Place(
        "loader and sampler",
        r"(DataLoader|DistributedSampler|set_epoch|RandomSampler)\(",
        ("--global-batch-size",),
        "samples over all ranks; their order is already there",
    ),
    Place("the optimizer", r"optim\.[A-Z]\w*\(|(Adam|AdamW|SGD|Muon|Optimizer)\(", ("make_optimizer",)),
    Place(
        "the schedule",
        r"lr_scheduler\.|(LR|_schedule\w*)\(|\[['\"]lr['\"]\] = ",
        ("lr_factor",),
        "a factor on the rates",
    ),
    Place(
        "the loss",
        r"^call (F\.|nn\.|torch\.|\S*functional\.)?(\w+_loss|\w*cross_entropy\w*|\w+Loss|criterion)\(",
        ("forward",),
        "sums and counts, no mean",
    ),
    Place(
        "backward passes",
        r"^call \S*(backward|no_sync|accumulate)\(|grad_sync = ",
        ("forward_backward", "train_step"),
        LEFT,
    ),
    Place("the clip", r"clip_grad_\w+\(", ("--max-grad-norm", "clip_gradients")),
    Place("precision", r"autocast\(|GradScaler\(|^call \S*scaler\.", ("--dtype",)),
    Place("step and zero_grad", r"^call \S*(opt\w*|optimizer)\.(step|zero_grad)\(", ("train_step",), LEFT),
    Place(
        "what it gathers", r"^call \S*all_gather\w*\(", ("forward",), "step_loss.gather, if the loss compares samples"
    ),
    Place(
        "sums over ranks",
        r"^call \S*(all_reduce|\.reduce|gather_for_metrics)\((?!.*grad)",
        ("forward",),
        "the log adds its sums up",
    ),
    Place("seeds", r"manual_seed\w*\(|seed_everything\(|set_seed\(", ("--seed",)),
    Place("checkpoints", r"torch\.save\(|save_pretrained\(|save_checkpoint\(", ("--save-every",), LEFT),
    Place("a resume", r"torch\.load\(", ("--resume",), "by itself; --init takes weights"),
    Place("weights", r"from_pretrained\(", ("--init", "make_model")),
    Place("the log", r"^call (print|\S*(wandb\.log|add_scalar|self\.log))\(", ("main",), LEFT),
    Place("the model", rf"^(self\.)?{MODEL} = (?!None|self|\w+\.module)", ("make_model",)),
)

# The recipes' names of common flags.
FLAGS = (
    (r"(train_|per_device_train_|micro_)?batch(_size)?", "--global-batch-size"),
    (r"(num_|max_|n_|total_)?(train_)?epochs?", "--epochs"),
    (r"(max_|num_|total_)?(train_|training_)?(steps|iters|iterations)", "--max-steps"),
    (r"(base_)?(learning_rate|lr)", "--lr"),
    (r"wd|weight_decay", "--weight-decay"),
    (r"warmup\w*|num_warmup\w*", "--warmup-steps"),
    (r"(num_)?workers|nw", "--workers"),
    (r"\w*clip\w*|max_(grad_)?norm", "--max-grad-norm"),
    (r"\w*accum\w*", "--micro-batch-size"),
    (r"\w*data(set)?(_?(dir|path|root|name|file))?|root", "--data"),
    (r"(output|out|save|log|checkpoint)_?(dir|path|folder)", "--out"),
    (r"(resume|checkpoint|snapshot)\w*", "--resume"),
    (r"pretrained|init_from|weights", "--init"),
    (r"(block|seq|context|max)_?\w*(size|len|length)", "--seq-len"),
    (r"amp|fp16|bf16|\w*precision|half", "--dtype"),
    (r"arch|model(_name)?", "--model"),
    (r"(log|print|logging)_\w+", "--log-every"),
    (r"(eval|val)_(every|interval|freq|steps)", "--eval-every"),
    (r"(save|checkpoint)_(every|interval|freq|steps)", "--save-every"),
    (r"(local_)?rank|world_size|gpus?|dist\w*|master\w*|nodes|multiprocessing\w*", "main"),
)
