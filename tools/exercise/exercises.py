"""The thirty exercises of docs/course: each is a bare.py with one planted fault, kept as the text that it replaces."""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from common import UserError
from tools.about import ROOT


@dataclass(frozen=True)
class Exercise:
    """One fault of one twin.

    Attributes:
        key: number of the chapter and a letter.
        title: a few words.
        recipe: whose bare.py has the fault.
        task: what somebody saw, and what should be seen.
        hint: where to look, for those who ask for it.
        changes: pairs of a text of bare.py, which stands there once, and what the exercise has in its place.
        sizes: numbers of processes that the check runs.
        resumes: whether the check also stops a training and continues it from its checkpoint.
        rank_0_logs: whether the mean loss counts on rank 0 alone.
    """

    key: str
    title: str
    recipe: str
    task: str
    hint: str
    changes: tuple[tuple[str, str], ...]
    sizes: tuple[int, ...] = (1, 2)
    resumes: bool = False
    rank_0_logs: bool = False

    @property
    def twin(self) -> Path:
        """The file without the fault."""
        return ROOT / "recipes" / self.recipe / "bare.py"

    def constants(self) -> dict[str, int]:
        """Those of the twin that the check makes small."""
        text = self.twin.read_text()
        return {name: value for name, value in CONSTANTS.items() if re.search(rf"^{name} = ", text, re.MULTILINE)}

    def faulty(self) -> str:
        """The twin's text with the fault."""
        text = self.twin.read_text()
        for old, new in self.changes:
            assert text.count(old) == 1, f"exercise {self.key}: {self.twin} has this {text.count(old)} times: {old}"
            text = text.replace(old, new)
        return text

    def file(self) -> str:
        """What the reader gets: the task, and the faulty twin."""
        lines = textwrap.wrap(f"Exercise {self.key}: {self.title}. {self.task}", 116)
        lines += ["", f"Fix this file, then run: python -m tools.exercise {self.key}"]
        return "\n".join(f"# {line}".rstrip() for line in lines) + "\n" + self.faulty()


def find(key: str) -> Exercise:
    """The exercise with this number and letter.

    Raises:
        UserError: there is none.
    """
    found = [one for one in EXERCISES if one.key == key.lower()]
    if not found:
        raise UserError(f"there is no exercise {key}: they are {', '.join(one.key for one in EXERCISES)}")
    return found[0]


# In the place of the constants of a twin. The micro-batches are of unequal size.
CONSTANTS = {"BATCH": 16, "MICRO_BATCH": 5, "MICRO_BATCHES": 4, "INNER_STEPS": 2}

LOG = "    mean = loss.detach().clone()\n    dist.all_reduce(mean)  # for the log alone\n"
WRITE = '        torch.save(state, f"{path}.part")\n        os.replace(f"{path}.part", path)\n'
PARALLEL_GPT = "    model = parallelize(make_model(train.vocab_size), device)\n"
ADAM = "    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)\n"
SAVED_BESIDE = '"""Let one process write, first beside the old file: a crash in the middle leaves that one."""'
CHOSEN = "        chosen = np.random.default_rng(step).integers(len(train), size=BATCH)"
SAME = "  # the same in every process\n"
AFTER_SPLIT = "    # After the split: these parameters are others.\n"

EXERCISES = (
    # --- 1: one process
    Exercise(
        "1a",
        "each step is larger than the last",
        "dp_resnet",
        "The gradient norm grows from step to step, and the loss soon with it, although each batch is an ordinary one.",
        "What does `backward` do with a gradient that is already there?",
        (("    optimizer.step()\n    optimizer.zero_grad()\n", "    optimizer.step()\n"),),
        (1,),
    ),
    Exercise(
        "1b",
        "nothing is learned",
        "dp_resnet",
        "The gradient norm looks healthy, and the loss does not fall: the weights never change.",
        "Follow one gradient from `backward` to the line that reads it.",
        (
            (
                "    optimizer.step()\n    optimizer.zero_grad()\n",
                "    optimizer.zero_grad()\n    optimizer.step()\n",
            ),
        ),
        (1,),
    ),
    Exercise(
        "1c",
        "the same order in each epoch",
        "dp_resnet",
        "The second epoch reads the images in the order of the first: the same images meet in the same batches again. "
        "The order must depend on the epoch and on nothing else, so that a continued run repeats it.",
        "What does the order of the images depend on?",
        (("torch.Generator().manual_seed(epoch)", "torch.Generator().manual_seed(0)"),),
        (1,),
    ),
    # --- 2: DDP
    Exercise(
        "2a",
        "around the wrapper",
        "ddp_resnet",
        "One process trains well. With two, each follows the gradient of its own images: the replicas drift apart.",
        "Who calls what, when DDP has to notice that a backward pass is coming?",
        (("F.cross_entropy(model(pixels), targets)", "F.cross_entropy(model.module(pixels), targets)"),),
    ),
    Exercise(
        "2b",
        "two epochs alike",
        "ddp_resnet",
        "The first epoch is right. The second one reads the images in the order of the first.",
        "A DistributedSampler does not know by itself that an epoch has ended.",
        (("        sampler.set_epoch(epoch)  # without it, each epoch has the same order\n", ""),),
    ),
    Exercise(
        "2c",
        "only rank 0 needs the log",
        "ddp_resnet",
        "Somebody saved time: as rank 0 alone prints, rank 0 alone computes the mean loss. Now two processes fail.",
        "Which calls must all processes make, each of them, in the same order?",
        ((LOG, "    mean = loss.detach().clone()\n    if dist.get_rank() == 0:\n        dist.all_reduce(mean)\n"),),
        rank_0_logs=True,
    ),
    # --- 3: the all-reduce by hand
    Exercise(
        "3a",
        "twice the gradient",
        "allreduce_resnet",
        "With N processes, the gradient norm is N times as large as it should be.",
        "An all-reduce adds up. What should each process have in the end?",
        (("        grad.div_(dist.get_world_size())\n", ""),),
    ),
    Exercise(
        "3b",
        "each starts elsewhere",
        "allreduce_resnet",
        "The check lets each process draw initial weights of its own, whatever its seed. Nobody corrects that: all get "
        "the same gradients, and hardly come nearer to each other. All should start with the weights of rank 0.",
        "Which collective gives all processes what one of them has?",
        (
            (
                "Send the first process's weights to all, once; and let each gradient be sent as soon as it is there.",
                "Let each gradient be sent as soon as it is there.",
            ),
            ("        dist.broadcast(parameter.detach(), src=0)\n", ""),
        ),
    ),
    Exercise(
        "3c",
        "the sum arrives, and nobody reads it",
        "allreduce_resnet",
        "The traffic is right, and every process waits for it. Still each takes a step along its own gradient.",
        "In which tensor does the sum arrive?",
        (("dist.all_reduce(parameter.grad, async_op=True)", "dist.all_reduce(parameter.grad.clone(), async_op=True)"),),
    ),
    # --- 4: accumulation and rates
    Exercise(
        "4a",
        "the mean of means",
        "multinode_resnet",
        "The numbers are right as long as the micro-batches are of equal size. Where the last one is smaller, its "
        "samples count more than others.",
        "How much should one sample count in the mean over a batch?",
        (
            (
                'F.cross_entropy(model(some), wanted, reduction="sum") / len(targets)',
                "F.cross_entropy(model(some), wanted) / len(micro_batches)",
            ),
        ),
    ),
    Exercise(
        "4b",
        "never sent",
        "multinode_resnet",
        "Accumulation has made the step wonderfully cheap on two processes: nothing crosses the network any more. "
        "One all-reduce of the gradients in a step is right, however many micro-batches it has.",
        "In which of the backward passes does DDP send?",
        (("is_last = i == len(micro_batches) - 1", "is_last = i == len(micro_batches)"),),
    ),
    Exercise(
        "4c",
        "a rate for another batch",
        "multinode_resnet",
        "A rule says that the learning rate grows with the batch. Somebody scaled it, and two processes now learn "
        "something else than one.",
        "How many samples does a step read in all, on one process and on two?",
        (("SGD(model.parameters(), lr=args.lr,", "SGD(model.parameters(), lr=args.lr * size,"),),
    ),
    # --- 5: checkpoints
    Exercise(
        "5a",
        "a bump after each resume",
        "ddp_resnet",
        "A training that was never stopped is right. One that continues from its checkpoint makes other steps: the "
        "loss has a bump there.",
        "What does SGD with momentum know, beside the weights?",
        (('    optimizer.load_state_dict(state["optimizer"])\n', ""),),
        resumes=True,
    ),
    Exercise(
        "5b",
        "a crash while it writes",
        "ddp_resnet",
        "The machine failed in the middle of a save. The file of the epoch before, which was good, is gone as well.",
        "When may the old file disappear?",
        ((SAVED_BESIDE, '"""Let one process write."""'), (WRITE, "        torch.save(state, path)\n")),
        resumes=True,
    ),
    Exercise(
        "5c",
        "a file for this program alone",
        "ddp_resnet",
        "It continues from its own file without a flaw. A plain model of the same kind refuses the file: its names are "
        "different ones.",
        "Compare the names of `model.state_dict()` before and after `parallelize`.",
        (
            ('"model": model.module.state_dict()', '"model": model.state_dict()'),
            ('    model.module.load_state_dict(state["model"])\n', '    model.load_state_dict(state["model"])\n'),
            ("        # `module` is the model without the wrapper.\n", ""),
        ),
        resumes=True,
    ),
    # --- 6: FSDP
    Exercise(
        "6a",
        "an optimizer of nothing",
        "fsdp_gpt",
        "The gradients are right in the first step. The weights never move.",
        "Which tensors did the optimizer get, and where are they now?",
        (
            (
                PARALLEL_GPT + AFTER_SPLIT + ADAM,
                "    model = make_model(train.vocab_size)\n" + ADAM + "    model = parallelize(model, device)\n",
            ),
        ),
    ),
    Exercise(
        "6b",
        "whole for a moment",
        "fsdp_gpt",
        "All numbers are right, and each process keeps only its part. Yet the model does not fit: at one moment of the "
        "step, all of it is there at once.",
        "What does FSDP gather at a time?",
        (
            (
                "Split each block's parameters over the processes, in place; and then what is left: embedding, last "
                "norm, head.\n\n    Parts that are split first are gathered one by one. The model as one part would be "
                'whole on each process.\n    """\n',
                'Split the parameters over the processes, in place."""\n',
            ),
            ("    for block in model.blocks.values():\n        fully_shard(block)\n", ""),
        ),
    ),
    Exercise(
        "6c",
        "twice the work",
        "fsdp_gpt",
        "All losses are right to the last digit, and two processes take as long for a step as one.",
        "How many sequences does each process read?",
        (
            (
                CHOSEN + SAME + "        mine = chosen[rank::size]  # a part for each\n"
                "        batch = train.read(np.zeros_like(mine), mine)",
                CHOSEN + "\n        batch = train.read(np.zeros_like(chosen), chosen)",
            ),
            ("One step on this process's part of a batch; returns", "One step; returns"),
            ("their parts are equal, so it is the mean over the batch.", "so it is the mean over the batch."),
        ),
    ),
    # --- 7: tensor parallelism
    Exercise(
        "7a",
        "two halves of different sentences",
        "tensor_gpt",
        "Each process reads a part of the batch of its own, as in DDP. The losses are wrong on two processes.",
        "Which processes work on the same sequence?",
        (
            (
                CHOSEN + SAME + "        mine = chosen[rank // tp :: size // tp]  # a part for each group\n",
                CHOSEN + "\n        mine = chosen[rank::size]\n",
            ),
            ("One step on this group's part of a batch; returns", "One step; returns"),
            ("  # the gradient is the mean over the groups; their parts are equal, so over the batch", ""),
        ),
        (1, 2, 4),
    ),
    Exercise(
        "7b",
        "groups that never meet",
        "tensor_gpt",
        "On two processes, which are one group, all is well. On four, the two groups train apart: each follows the "
        "gradient of its own half of the batch.",
        "Who averages the gradients of the groups? In units as small as those of chapter 6.",
        (
            (
                '    for block in model.blocks.values():\n        fully_shard(block, mesh=mesh["dp"])\n'
                '    return fully_shard(model, mesh=mesh["dp"])\n',
                "    return model\n",
            ),
        ),
        (4,),
    ),
    Exercise(
        "7c",
        "a sum that everybody gets",
        "tensor_gpt",
        "One process is right. With two, the first block fails: it adds a tensor of all positions to one of half of "
        "them.",
        "Which positions does each process hold between two pairs of matrices?",
        (("parallel.RowwiseParallel(output_layouts=Shard(1))\n", "parallel.RowwiseParallel()\n"),),
    ),
    # --- 8: pipeline
    Exercise(
        "8a",
        "each stage clips by itself",
        "pipeline_gpt",
        "On two processes, each divides its gradients by another norm: that of the layers it has.",
        "Which parameters does the norm of a gradient count?",
        (
            ("    # Each parameter is in one process: what there is of all is added up, not averaged.\n", ""),
            ("and the gradient norm over the layers of all processes.", "and the gradient norm."),
            ("    dist.all_reduce(square)\n", ""),
        ),
        (1, 2, 4),
    ),
    Exercise(
        "8b",
        "the wrong answers",
        "pipeline_gpt",
        "On one process it learns. On two, the loss stays where guessing would be, or falls much more slowly.",
        "Who reads the tokens, who reads the targets, and do they belong together?",
        (
            (
                "np.random.default_rng(step).integers(\n            len(train), size=BATCH\n        )"
                "  # the same in every process: the last one needs the targets\n",
                "np.random.default_rng([step, rank]).integers(len(train), size=BATCH)\n",
            ),
        ),
        (1, 2, 4),
    ),
    Exercise(
        "8c",
        "layers for two",
        "pipeline_gpt",
        "Two processes share the four layers fairly, and the numbers are right. On one, three or four, something is "
        "wrong.",
        "Compute by hand which process has layer 3, of 1, 2, 3 and 4 processes.",
        (("int(name) * size // model.shape.num_layers != rank]", "int(name) // 2 != rank]"),),
        (1, 2, 3, 4),
    ),
    # --- 9: context parallelism
    Exercise(
        "9a",
        "every part believes that it comes first",
        "context_gpt",
        "On one process, the losses are right. On two, the second half of each sequence is read as if it were a first.",
        "How does a token know where in its sequence it stands?",
        (("targets.chunk(size, 1)[rank], positions)", "targets.chunk(size, 1)[rank])"),),
    ),
    Exercise(
        "9b",
        "gradients that stay at home",
        "context_gpt",
        "The first loss is right on two processes. Its gradient is not, and neither is what follows.",
        "A process uses the keys of others. To whom do the gradients of these keys belong?",
        (
            (
                "        part = grad.new_empty(grad.shape[1:])\n"
                "        dist.reduce_scatter_tensor(part, grad.contiguous().flatten(0, 1))\n"
                "        return part\n",
                "        return grad[dist.get_rank()]\n",
            ),
        ),
    ),
    Exercise(
        "9c",
        "short memories",
        "context_gpt",
        "It is fast, as no keys or values are sent at all. The losses are those of a model that reads half sequences.",
        "How does attention get to see the tokens of other processes?",
        (("        block.attention.attend = attend\n", ""),),
    ),
    # --- 10: slow links
    Exercise(
        "10a",
        "too far a step",
        "diloco_gpt",
        "One process is right. With N, each outer step goes N times as far as the replicas moved on average.",
        "The outer gradient is a mean.",
        (("        before.grad /= dist.get_world_size()\n", ""),),
    ),
    Exercise(
        "10b",
        "nobody follows",
        "diloco_gpt",
        "The outer optimizer makes its steps, the traffic is right, and the replicas never hear of it.",
        "Which tensors does the outer optimizer change, and which ones does the next inner step read?",
        (
            (
                "    model.outer.step()\n"
                "    for before, parameter in zip(model.before, model.parameters(), strict=True):\n"
                "        parameter.data.copy_(before)\n",
                "    model.outer.step()\n",
            ),
        ),
    ),
    Exercise(
        "10c",
        "the outer half of a checkpoint",
        "diloco_gpt",
        "A training that was never stopped is right. One that was continued is right at first, and differs after the "
        "next outer step.",
        "There are two optimizers, and each remembers something.",
        (('    model.outer.load_state_dict(state["outer"])\n', ""),),
        resumes=True,
    ),
)
