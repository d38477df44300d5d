"""Twenty questions as users ask them: for `python -m benchmarks.plan --only questions`.

Answered by the formulas, in milliseconds; the commands count, which takes up to half a minute each.
"""

import itertools
from dataclasses import dataclass

from tools import about
from tools.plan import advice, answer, hardware, known, published
from tools.plan.count import Case
from tools.plan.predict import predict

LLAMA_8B = "--num-layers 32 --width 4096 --num-heads 32 --num-kv-heads 8 --mlp-width 14336 --vocab-size 128256"
LLAMA_70B = "--num-layers 80 --width 8192 --num-heads 64 --num-kv-heads 8 --mlp-width 28672 --vocab-size 128256"
LLAMA_405B = "--num-layers 126 --width 16384 --num-heads 128 --num-kv-heads 8 --mlp-width 53248 --vocab-size 128256"
GPT2 = "--num-layers 12 --width 768 --num-heads 12 --vocab-size 50304 --tied"


def mpt(model: str) -> str:
    """Flags of a GPT of an MPT model's size; its MLP has gates, and is as much narrower."""
    width, layers, heads = published.MPT[model]
    return f"--num-layers {layers} --width {width} --num-heads {heads} --vocab-size 50368 --tied"


@dataclass(frozen=True)
class Asked:
    """A question.

    Attributes:
        text: as somebody asks it.
        recipe: that is planned.
        size: number of ranks.
        machine: of hardware.toml.
        flags: of the recipe.
        tokens: of the training, as --tokens takes them, or "".
        row: a published row like it, or "".
    """

    text: str
    recipe: str
    size: int
    machine: str
    flags: str
    tokens: str = ""
    row: str = ""


def steps(length: int, batch: int, micro: int, recompute: str = "none") -> str:
    """Flags of a step."""
    return f"--seq-len {length} --global-batch-size {batch} --micro-batch-size {micro} --recompute {recompute}"


QUESTIONS = (
    Asked("Will 8B at 8k fit on 8 x 80 GB?", "fsdp_gpt", 8, "h100-ib", f"{LLAMA_8B} {steps(8192, 8, 1)}"),
    Asked("Will 8B at 32k fit on 8 x 80 GB?", "fsdp_gpt", 8, "h100-ib", f"{LLAMA_8B} {steps(32768, 8, 1, 'full')}"),
    Asked(
        "How fast is 8B at 8k on 8 H100 that are held to 500 W?",
        "fsdp_gpt",
        8,
        "h100-500w",
        f"{LLAMA_8B} {steps(8192, 16, 2, 'selective')}",
        row="torchtitan 8B FSDP8",
    ),
    Asked("8B at 128k on 64 H100?", "context_gpt", 64, "h100-ib", f"{LLAMA_8B} {steps(131072, 8, 1, 'full')} --cp 8"),
    Asked("13B on 16 A100?", "fsdp_gpt", 16, "a100-ib", f"{mpt('13b')} {steps(2048, 256, 4, 'full')}"),
    Asked(
        "Does 7B fit on 8 A100 of 40 GB?",
        "fsdp_gpt",
        8,
        "a100-40-ib",
        f"{mpt('7b')} {steps(2048, 384, 12, 'full')}",
        row="MPT 7b 2048 tokens 8 a100-40-ib",
    ),
    Asked(
        "How long for 1T tokens of 8B on 64 H100?", "fsdp_gpt", 64, "h100-ib", f"{LLAMA_8B} {steps(8192, 128, 1)}", "1T"
    ),
    Asked("8B, 15T tokens, 1,024 H100?", "fsdp_gpt", 1024, "h100-ib", f"{LLAMA_8B} {steps(8192, 2048, 1)}", "15T"),
    Asked(
        "70B on 64 H100, tokens a second?",
        "fsdp_gpt",
        64,
        "h100-ib",
        f"{mpt('70b')} {steps(2048, 2048, 8, 'full')}",
        row="MPT 70b 2048 tokens 64 h100-ib",
    ),
    Asked(
        "70B with tensor parallel 8 on 256 H100 of 500 W?",
        "tensor_gpt",
        256,
        "h100-500w",
        f"{LLAMA_70B} {steps(8192, 512, 16, 'full')} --tp 8",
        row="torchtitan 70B TP8 FSDP32",
    ),
    Asked(
        "Does 70B fit on one machine of 8 H100?", "fsdp_gpt", 8, "h100-ib", f"{LLAMA_70B} {steps(4096, 8, 1, 'full')}"
    ),
    Asked("405B on 512 H100 by FSDP alone?", "fsdp_gpt", 512, "h100-ib", f"{LLAMA_405B} {steps(4096, 512, 1, 'full')}"),
    Asked("Does 1B fit on one RTX 4090?", "ddp_gpt", 1, "rtx4090-pcie", f"{mpt('1b')} {steps(2048, 32, 1, 'full')}"),
    Asked("GPT-2 124M, 10B tokens on 8 H100?", "ddp_gpt", 8, "h100-ib", f"{GPT2} {steps(1024, 512, 32)}", "10B"),
    Asked(
        "3B at 16k on 8 H100?",
        "fsdp_gpt",
        8,
        "h100-ib",
        f"{mpt('3b')} {steps(16384, 48, 1)}",
        row="MPT 3b 16384 tokens 8 h100-ib",
    ),
    Asked(
        "7B at 64k on 8 H100?",
        "fsdp_gpt",
        8,
        "h100-ib",
        f"{mpt('7b')} {steps(65536, 16, 1, 'full')}",
        row="MPT 7b 65536 tokens 8 h100-ib",
    ),
    Asked(
        "1B at 32k on 8 A100?",
        "fsdp_gpt",
        8,
        "a100-ib",
        f"{mpt('1b')} {steps(32768, 32, 1)}",
        row="MPT 1b 32768 tokens 8 a100-ib",
    ),
    Asked(
        "30B on 32 A100 of 40 GB?",
        "fsdp_gpt",
        32,
        "a100-40-ib",
        f"{mpt('30b')} {steps(2048, 128, 4, 'full')}",
        row="MPT 30b 2048 tokens 32 a100-40-ib",
    ),
    Asked("7B on 2 machines with 100 Gbit/s?", "fsdp_gpt", 16, "h100-eth", f"{mpt('7b')} {steps(2048, 128, 8)}"),
    Asked("7B in a pipeline of 8?", "pipeline_gpt", 8, "h100-ib", f"{mpt('7b')} {steps(2048, 128, 4)} --pp 8"),
)


def answered(asked: Asked) -> str:
    """The question, its command, its answer, and what a published row says."""
    machine = hardware.find(asked.machine)
    case = Case(about.ROOT / "recipes" / asked.recipe, asked.size, tuple(asked.flags.split()))
    work = advice.work(case, machine)
    found = predict([work], machine)
    tokens = work.units["tokens"]
    rate = work.samples * tokens / found.step_s / asked.size
    step = answer.step_of(work, found)
    low, high = (rate * found.step_s / one for one in reversed(known.between("gpt", machine, step)))
    fits = "fits" if answer.fits(found, machine) else "**does not fit**"
    words = f"{found.peak_bytes / answer.GIB:.1f} of {machine.memory_gib:g} GiB: {fits}; {rate:,.0f} tokens/s a GPU "
    words += f"({low:,.0f} to {high:,.0f})"
    if known.untested(known.like("gpt", machine), machine, step):
        words += ", outside of what was tested"
    if asked.tokens:
        budget = answer.budget(answer.number_of_tokens(asked.tokens), 0.0, [work], machine)
        days = (known.span(one * answer.DAY_S) for one in (budget.days, budget.shortest_days, budget.longest_days))
        words += "; {} ({} to {}), ".format(*days)
        words += f"{budget.gpu_hours:,.0f} GPU-hours"
    said = ""
    for row in itertools.chain(published.gpts(), published.foundry()):
        if row.name == asked.row:
            seen = ", which no fit has seen" if row.program == "llm-foundry" and published.held_out(row) else ""
            said = f" Published: {row.local_tokens / row.step_s:,.0f} tokens/s a GPU ({row.name}{seen})."
    assert bool(said) == bool(asked.row), asked.row
    more = f" --tokens {asked.tokens}" if asked.tokens else ""
    command = f"python -m tools.plan recipes/{asked.recipe} --world-size {asked.size} --hardware {asked.machine}{more}"
    return f"**{asked.text}** {words}.{said}\n\n```\n{command} {asked.flags}\n```"


def of_questions() -> str:
    """All of them."""
    return "\n\n".join(map(answered, QUESTIONS))
