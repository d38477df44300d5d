# ruff: noqa: E501 (a rule's text stands on one line, as it does in the script)
"""Mistakes as rules that alter any script of `shapes`, and a random choice of scripts with one each."""

import random
import re
from dataclasses import dataclass

from tests.harness import shapes

ANY = "."  # the line that the finding must name is not one alone
STEP, SAVE, LOAD, INIT = r"step\(", r"torch\.save", r"torch\.load", "init_process_group"
SENDS = r"^( *)dist\.all_reduce\((total|avg_loss|fsdp_loss|rt)\b(.*)\)$"
EPOCHS = r"for .*(loader|train|train_data)\b.*:|iter\(loader\)"


@dataclass(frozen=True)
class Rule:
    """A mistake: patterns and what replaces them, all of which must be in a script, and not `without`."""

    kinds: tuple[str, ...]
    changes: tuple[tuple[str, str], ...]
    line: str
    needs: str = ""
    without: str = "$^"

    def apply(self, text: str) -> str:
        """The script with the mistake, or "" if it cannot have it."""
        if not re.search(self.needs, text) or re.search(self.without, text):
            return ""
        for pattern, new in self.changes:
            text, count = re.subn(pattern, new, text, flags=re.MULTILINE)
            if not count:
                return ""
        return text


def rule(kinds: str, line: str, *changes: tuple[str, str], needs: str = "", without: str = "$^") -> Rule:
    """One of several kinds, by "|"."""
    return Rule(tuple(kinds.split("|")), changes, line, needs, without)


RULES = (
    rule("set_epoch is missing", EPOCHS, (r"^( *).*sampler\.set_epoch\(.*\)\n", r"\1pass\n")),
    rule(
        "never wrapped",
        "optimizer = |configure_optimizers",
        (r"^( *)model = DDP\((\w+(?:\(\))?).*\)\n", r"\1model = \2\n"),
        without=r"\.module|no_sync",
    ),
    rule(
        "around the wrapper",
        "loss = ",
        (r"loss = (F\.cross_entropy|criterion)\(model\(", r"loss = \1(model.module("),
        needs="model = DDP",
    ),
    rule(
        "names of the wrapper",
        SAVE,
        (r"model\.module\.state_dict\(\)", "model.state_dict()"),
        (r"model\.module\.load_state", "model.load_state"),
    ),
    rule(
        "saved by all ranks",
        SAVE,
        (r"if (?:rank|self\.global_rank|dist\.get_rank\(\)) == 0[^\n]*:(?=\n(?:[^\n]*\n)?[^\n]*torch\.save)", "if True:"),
    ),
    rule("zero_grad is missing", STEP, (r"^( *)\S*opt\w*\.zero_grad\(.*\)\n", r"\1pass\n")),
    rule("zero_grad before the step", "zero_grad", (r"^( *)(\S*opt\w*)\.step\(\)\n", r"\1\2.zero_grad()\n\1\2.step()\n")),
    rule("pickle is trusted", LOAD, ("weights_only=True", "weights_only=False")),
    rule("rank as device", "device|cuda|local_rank", (r'environ\["LOCAL_RANK"\]', 'environ["RANK"]')),
    rule("loaded onto GPU 0", LOAD, (r"map_location=[^,]+,", 'map_location="cuda:0",')),
    rule(
        "checkpoint lacks the optimizer|resume without optimizer state",
        f"{SAVE}|{LOAD}",
        (r', "(OPTIMIZER|optimizer|opt)": \S*?state_dict\(\)', ""),
        (r"^( *)\S*optimizer\.load_state_dict.*\n", r"\1pass\n"),
    ),
    rule(
        "checkpoint lacks the schedule|resume at another rate",
        f"{SAVE}|{LOAD}",
        (r', "scheduler": scheduler\.state_dict\(\)', ""),
        (r"^( *)scheduler\.load_state_dict.*\n", r"\1pass\n"),
    ),
    rule("resume repeats an epoch", LOAD, (r'("EPOCHS_RUN"|"epoch"): epoch \+ 1', r"\1: epoch"), needs=LOAD),
    rule(
        "accumulation not divided",
        r"backward\(",
        (r"^(.*) / (gradient_accumulation_steps|accumulation|self\.accumulate)$", r"\1"),
        without="accumulate=1",
    ),
    rule("sent in each micro-batch", r"backward\(", (r"model\.require_backward_grad_sync = .*", "pass"), needs="DDP\\(model"),
    rule("sent in each micro-batch", r"backward\(", (r"nullcontext\(\) if .* else model\.no_sync\(\)", "nullcontext()"), without="accumulate=1"),
    rule(
        "nothing is sent",
        r"backward\(",
        (r"model\.require_backward_grad_sync = .*", "model.require_backward_grad_sync = False"),
        needs="DDP\\(model",
    ),
    rule("nothing is sent", r"backward\(", (r"nullcontext\(\) if .* else model\.no_sync\(\)", "model.no_sync()")),
    rule("clip after the step", "clip_grad", (r"^( *[\w.]*clip_grad_norm_\(.*\)\n)( *[\w.]*step\(.*\)\n)", r"\2\1")),
    rule("clip before unscale", "clip_grad", (r"^ *scaler\.unscale_\(optimizer\)\n", ""), needs="enabled=True"),
    rule("schedule never stepped", "scheduler = |OneCycleLR", (r"^( *)(lr_)?scheduler\.step\(.*\)\n", r"\1pass\n")),
    rule("group left open", INIT, (r"^( *)dist\.destroy_process_group\(\)\n", r"\1pass\n"), needs=INIT),
    rule("gloo between GPUs", INIT, ('"nccl"', '"gloo"'), needs=r"\.cuda\(|to\(rank\)|set_device", without="else"),
    rule(
        "rank written down",
        INIT,
        (r'init_process_group\((?:backend="nccl".*|"nccl"|"gloo")\)$', 'init_process_group("gloo", rank=0, world_size=2)'),
    ),
    rule("same samples on all ranks|environments with one seed", ANY, (r"manual_seed\((\d+) \+ .*\)", r"manual_seed(\1)"), without="Sampler\\(|make_data\\(2|estimate_loss"),
    rule("same samples on all ranks", ANY, (r"range\(self\.rank, 96, self\.world\)", "range(96)")),
    rule("not all ranks come", ANY, (r"^with model\.join\(\):", "if True:")),
    rule("not all ranks come", "all_reduce", (SENDS, r"\1dist.get_rank() == 0 and dist.all_reduce(\2\3)")),
    rule(
        "local loss logged",
        "print",
        (SENDS, r"\1pass"),
        (r"(total|avg_loss)\.item\(\) / world(_size)?", r"\1.item()"),
    ),
    rule(
        "rate scaled twice",
        "optimizer = ",
        (r"(batch_size \* world_size|lr=1e-3 \* dist\.get_world_size\(\))", r"\1 * dist.get_world_size()"),
    ),
    rule(
        "parameters without optimizer",
        "optimizer = ",
        (r"(Adam|AdamW|SGD)\(model\.parameters\(\)", r"\1(model[0].parameters()"),
        needs=r"model = (make_net|nn\.Sequential)",
        without=r"DDP\(.*\n(.*\n)*.*opt(imizer)? = torch|accelerator|scaler|DataParallelNaive",
    ),
    rule(
        "optimizer of other parameters",
        "optimizer = ",
        (r"^( *)optimizer = .*\n", ""),
        (r"^( *)for layer in \(model", r"\1optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)\n\1for layer in (model"),
    ),
    rule("shapes that broadcast", "mse_loss", (r"torch\.randn\(20, 4\)", "torch.randn(20, 1)")),
    rule("sum of gradients", "all_reduce", (r" / world_size\)$", ")"), needs="flat = "),
    rule("sum of gradients", "all_reduce", (r"p\.grad /= .*", "pass")),
    rule(
        "different initial weights",
        "optimizer = ",
        (r"torch\.manual_seed\((1|42)\)", "torch.manual_seed(dist.get_rank())"),
        without="model = DDP",
    ),
    rule(
        "evaluation counts duplicates",
        "val_loader = ",
        (r"shuffle=False, drop_last=True\)", "shuffle=False)"),
        (r"make_data\(64, 1\)", "make_data(65, 1)"),
    ),
    rule(
        "batch statistics per rank",
        "DDP\\(",
        (r"^ *model = nn\.SyncBatchNorm.*\n", ""),
        (r"= 16, 0\.1, 64", "= 4, 0.1, 64"),
    ),
    rule(
        "optimizer made again",
        "optimizer = ",
        (r"^( *)model\.train\(\)\n", r"\1model.train()\n\1optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)\n"),
        needs="optimizer = torch.optim.SGD",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Planted:
    """A script with one mistake, and the lines of which one must be named."""

    shape: str
    kinds: tuple[str, ...]
    text: str
    lines: tuple[int, ...]

    def is_found(self, findings: list[tuple[str, int]]) -> bool:
        """Whether kind and line are among them."""
        return any(kind in self.kinds and number in self.lines for kind, number in findings)


def everything() -> list[Planted]:
    """Each rule in each script that can have it."""
    found = []
    for shape, right in shapes.ALL.items():
        for one in RULES:
            text = one.apply(right)
            if text and text != right:
                compile(text, shape, "exec")
                lines = tuple(i for i, line in enumerate(text.splitlines(), 1) if re.search(one.line, line))
                found.append(Planted(shape, one.kinds, text, lines))
    return found


def choose(count: int, seed: int) -> list[Planted]:
    """Some at random: first the kind, then a script that has not had it."""
    source, left = random.Random(seed), everything()
    found = []
    for _ in range(count):
        kind = source.choice(sorted({one.kinds[0] for one in left}))
        found.append(source.choice([one for one in left if one.kinds[0] == kind]))
        left.remove(found[-1])
    return found
