"""docs/explorer.html: the formulas of transformer.py and predict.py with sliders, in one file without a network.

The page computes in JavaScript. All numbers that the formulas use come from here, as JSON, and
tests/tools/test_explorer.py compares what both predict.
"""

import dataclasses
import functools
import html
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.workloads import gpt
from tools import about
from tools.plan import answer, known, predict, sweep, transformer
from tools.plan.hardware import Hardware, table
from tools.plan.transformer import STRATEGIES, Layout, Shape

TEMPLATE = Path(__file__).with_suffix(".html")
PAGE = about.ROOT / "docs" / "explorer.html"
VOCAB = 50_304  # GPT-2's 50,257 tokens, rounded up to a multiple of 64
# Width, layers and heads: Brown et al. 2020, https://arxiv.org/abs/2005.14165, Zhang et al. 2022,
# https://arxiv.org/abs/2205.01068.
GPTS = (
    (768, 12, 12),
    (1024, 24, 16),
    (1536, 24, 16),
    (2048, 24, 32),
    (2560, 32, 32),
    (4096, 32, 32),
    (5120, 40, 40),
    (7168, 48, 56),
    (9216, 64, 72),
    (12288, 96, 96),
)
# Key-value heads, hidden units of an MLP, vocabulary and whether it is tied as well: each as in the config.json of that
# model on the Hugging Face hub, or of a copy where the model's own is gated, such as unsloth/Llama-3.2-1B and
# Qwen/Qwen2.5-32B; the 405B as in table 3 of https://arxiv.org/abs/2407.21783.
LLAMAS = {
    "Llama 3.2 1B": (2048, 16, 32, 8, 8192, 128_256, True),
    "Llama 3 8B": (4096, 32, 32, 8, 14_336, 128_256, False),
    "Llama 3 70B": (8192, 80, 64, 8, 28_672, 128_256, False),
    "Llama 3 405B": (16_384, 126, 128, 8, 53_248, 128_256, False),
    "Qwen2.5 1.5B": (1536, 28, 12, 2, 8960, 151_936, True),
    "Qwen2.5 7B": (3584, 28, 28, 4, 18_944, 152_064, False),
    "Qwen2.5 32B": (5120, 64, 40, 8, 27_648, 152_064, False),
    "Qwen2.5 72B": (8192, 80, 64, 8, 29_568, 152_064, False),
}
MODELS = (*GPTS, *LLAMAS.values())
# Not "selective": transformer.py has Megatron's, and the recipes keep other results.
RECOMPUTE = ("none", "full")
LATENCIES_US = (1, 2, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
MTBF_HOURS = (1_000, 2_000, 5_000, 10_000, 20_000, 50_676, 100_000, 200_000, 500_000)
LABELS = {
    "hardware": "Hardware",
    "strategy": "Strategy",
    "parts": "Split (tp, pp, cp, ep)",
    "gpus": "GPUs",
    "model": "Model",
    "seq_len": "Tokens in a sequence",
    "sequences": "Sequences of a GPU",
    "micro_batch": "Sequences in a micro-batch",
    "recompute": "Recompute",
    "bandwidth": "Network of a GPU",
    "latency_us": "Latency of the network",
    "mtbf_hours": "A GPU fails every",
    "budget": "Tokens of the training",
}
WORDS: dict[str, Any] = {  # of legends, from bottom to top
    "strategies": {
        "ddp_gpt": "Data parallel",
        "fsdp_gpt": "Fully sharded",
        "tensor_gpt": "Tensor parallel",
        "pipeline_gpt": "Pipeline",
        "context_gpt": "Context parallel",
        "moe_gpt": "Expert parallel, another model",
        "diloco_gpt": "Replicas apart, other numbers",
    },
    "shares": ["matrix products", "other operators", "waiting in a pipeline", "sending", "failures and saves"],
    "memory": ["parameters", "gradients", "optimizer", "activations and others"],
    "recompute": {"none": "nothing", "full": "all of each layer"},
}
APART = (
    "moe_gpt",
    "diloco_gpt",
)  # which train another model, or to other numbers: no choice in the place of the others
DEFAULT: dict[str, Any] = {
    "hardware": "h100-ib",
    "strategy": "fsdp_gpt",
    "parts": 8,
    "gpus": 64,
    "model": 5,
    "seq_len": 4096,
    "sequences": 4,
    "micro_batch": 1,
    "recompute": "none",
    "bandwidth": 1,
    "latency_us": 20,
    "mtbf_hours": 50_676,
    "budget": 10**12,
}


@functools.cache
def machines() -> dict[str, Hardware]:
    """Those of hardware.toml."""
    return table()


def values() -> dict[str, list[Any]]:
    """What each control of the page can be: of a slider in its order, of a selection by name."""
    return {
        "hardware": list(machines()),
        "strategy": list(STRATEGIES),
        "parts": [2, 4, 8, 16],
        "gpus": sweep.SIZES,
        "model": list(range(len(MODELS))),
        "seq_len": [2**i for i in range(9, 18)],
        "sequences": [2**i for i in range(8)],
        "micro_batch": [2**i for i in range(6)],
        "recompute": list(RECOMPUTE),
        "bandwidth": [2.0**i for i in range(-4, 3)],
        "latency_us": list(LATENCIES_US),
        "mtbf_hours": list(MTBF_HOURS),
        "budget": [n * 10**i for i in range(9, 14) for n in (1, 2, 5)],
    }


def experts(recipe: str) -> dict[str, int]:
    """What a recipe puts in the place of a layer's MLP, by its own defaults."""
    if not about.has_flag(recipe, "--experts"):
        return {"experts": 1, "top_k": 1}
    return {"experts": sweep.default(recipe, "--experts"), "top_k": sweep.default(recipe, "--top-k")}


def shape(model: int, seq_len: int, recipe: str = "ddp_gpt") -> Shape:
    """A model of `MODELS`; of `GPTS` with the recipes' defaults for all other sizes."""
    width, layers, heads, *more = MODELS[model]
    own = gpt.Shape(VOCAB, layers, heads, width)
    kv_heads, mlp_width, vocab, tied = more or (own.num_kv_heads, own.mlp_width, VOCAB, own.tied)
    return Shape(width, layers, heads, kv_heads, mlp_width, True, vocab, seq_len, bool(tied), **experts(recipe))


def model_names() -> list[str]:
    """What they are called, in their order."""
    return [f"GPT {shape(i, 0).parameters / 1e9:.3g}B" for i in range(len(GPTS))] + [*LLAMAS]


def machine(chosen: Mapping[str, Any]) -> Hardware:
    """The chosen hardware, with the network and the failure rate of the sliders."""
    found = machines()[chosen["hardware"]]
    return dataclasses.replace(
        found,
        network_bandwidth=found.network_bandwidth * chosen["bandwidth"],
        network_latency_s=chosen["latency_us"] * 1e-6,
        mtbf_hours=chosen["mtbf_hours"],
    )


def predicted(chosen: Mapping[str, Any]) -> dict[str, float]:
    """What the page's function plan must return.

    Args:
        chosen: a value for each key of `DEFAULT`; `gpus` must be a multiple of `parts` for tensor_gpt and pipeline_gpt.

    Returns:
        The fields of `predict.Prediction`, tokens_s (tokens a second over all ranks), days (of the budget) and the
        bytes of each kind of memory of the rank that needs most.
    """
    size, of_machine = chosen["gpus"], machine(chosen)
    parts = chosen["parts"] if flag(chosen["strategy"]) else 1
    layout = transformer.of_recipe(
        chosen["strategy"],
        size,
        parts,
        micro_batch=min(chosen["micro_batch"], chosen["sequences"] * sharing(chosen)),
        global_batch=chosen["sequences"] * size,
        recompute=chosen["recompute"],
        local_size=of_machine.local_size,
    )
    work = transformer.work(shape(chosen["model"], chosen["seq_len"], chosen["strategy"]), layout)
    found = predict.predict([work], of_machine)
    tokens_s = layout.global_batch * chosen["seq_len"] / found.step_s
    days = chosen["budget"] / tokens_s / (1 - min(found.lost, 0.99)) / answer.DAY_S
    return {**dataclasses.asdict(found), "tokens_s": tokens_s, "days": days, **work.memory}


def flag(recipe: str) -> str:
    """The flag that says over how many ranks a recipe splits a model or its text: --tp, --pp, --cp, --ep, or ""."""
    return next((one for one in (*sweep.PARTS, sweep.EXPERTS) if about.has_flag(recipe, one)), "")


def sharing(chosen: Mapping[str, Any]) -> int:
    """Ranks that read the same sequences: those of an --ep group read different ones."""
    return chosen["parts"] if flag(chosen["strategy"]) in sweep.PARTS else 1


def strategy(recipe: str) -> dict[str, Any]:
    """What the page needs to make a recipe's layout, by the rules of `transformer.of_recipe`."""
    few = transformer.of_recipe(recipe, 2, 2)
    many = transformer.of_recipe(recipe, 4, 2, global_batch=8)
    chosen = ("dp", "tp", "pp", "cp", "ep", "micro_batch", "global_batch", "recompute", "local_size", "gradients")
    fixed = {field.name: getattr(many, field.name) for field in dataclasses.fields(Layout) if field.name not in chosen}
    own = {
        "flag": flag(recipe),
        "layout": fixed,
        "gradients": [few.gradients, many.gradients],
        "shape": experts(recipe),
    }
    return own | {"trains": recipe if recipe in APART else "the same"}


def layouts() -> list[dict[str, Any]]:
    """What the table of layouts chooses from; what cannot be, the page's function refusal leaves out."""
    every = values()
    return [
        {"strategy": recipe, **({"parts": parts} if parts else {}), "micro_batch": micro_batch, "recompute": recompute}
        for recipe in STRATEGIES
        for parts, micro_batch, recompute in itertools.product(
            every["parts"] if flag(recipe) else [0], every["micro_batch"], every["recompute"]
        )
    ]


def control(key: str, choices: Sequence[Any]) -> str:
    """A selection of what has a name, or a slider, whose value is a place in `choices`."""
    named: dict[str, str] = {
        "hardware": {
            name: f"{name}: {re.sub('NVIDIA |Tesla |GeForce ', '', one.gpu)}" for name, one in machines().items()
        },
        "strategy": {recipe: f"{name} ({recipe})" for recipe, name in WORDS["strategies"].items()},
        "recompute": WORDS["recompute"],
        "model": dict(enumerate(model_names())),
    }.get(key, {})
    label = f'<div class="row"><label for="{key}">{LABELS[key]}</label>'
    if named:
        options = "".join(f'<option value="{i}">{html.escape(named[one])}</option>' for i, one in enumerate(choices))
        return f'<div>{label}</div><select id="{key}">{options}</select></div>'
    slider = f'<input id="{key}" type="range" min="0" max="{len(choices) - 1}">'
    return f'<div>{label}<b id="{key}-says" aria-hidden="true"></b></div>{slider}</div>'


def legend(name: str) -> str:
    """What the lines, or the parts of bars, are; the script writes the figures of the latter."""
    words = WORDS[name]
    if isinstance(words, dict):
        line = '<svg width="36" height="12" aria-hidden="true"><path class="curve {}" d="M0 6H36"/></svg>'
        return "\n".join(f"<span>{line.format(kind)}{word}</span>" for kind, word in words.items())
    box = '<svg width="14" height="14" aria-hidden="true"><rect class="k{}" width="14" height="14"/></svg>'
    return "\n".join(f'<span>{box.format(i)}{word} <b id="{name}-{i}"></b></span>' for i, word in enumerate(words))


def published() -> str:
    """The measurements that have an MFU, as a list."""
    rows = sorted((one for one in known.compared() if one.workload == "gpt" and one.mfu), key=lambda one: one.ranks)
    return "\n".join(
        f"<li>{html.escape(one.name)}: MFU {one.mfu:.1%} on {one.ranks:,} {one.family} GPUs; predicted with "
        f"an error of {one.error:+.0%}</li>"
        for one in rows
    )


def data() -> dict[str, Any]:
    """All that the page's script takes from Python."""
    every = known.compared()
    named = ["DIAGONAL", "OPERATORS", "MOVED", "MOVED_MLP", "CASTS", "UPDATE_BYTES", "HALF", "FLOAT"]
    named += ["ROUTED", "OF_EXPERT", "ROWS_MOVED"]
    return {
        "constants": {name: getattr(transformer, name) for name in named}
        | {"FACTORS": predict.FACTORS, "BACKWARD": predict.BACKWARD, "HOUR_S": predict.HOUR_S}
        | {"RECOVERY_S": predict.recovery_s()}
        | {name: getattr(known, name) for name in ("ENOUGH", "NEAR", "TODAY", "OTHER_FAMILY")}
        | {name: getattr(known, name) for name in ("SCALES", "PLAIN_SCALES")},
        "machines": {name: dataclasses.asdict(one) for name, one in machines().items()},
        "models": [dataclasses.asdict(shape(model, 0)) for model in range(len(MODELS))],
        "strategies": {recipe: strategy(recipe) for recipe in STRATEGIES},
        "values": values(),
        "layouts": layouts(),
        "words": {name: WORDS[name] for name in ("shares", "memory")},
        "default": DEFAULT,
        "published": [dataclasses.asdict(one) for one in every if one.workload == "gpt" and one.family != "cpu"],
        "all_rows": {
            "count": len(every),
            "worst": max(abs(one.error) for one in every),
            "farthest": max(abs(math.log1p(one.error)) for one in every),
        },
    }


def page() -> str:
    """The text of docs/explorer.html."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(part)}" for key, part in data().items())
    parts = {
        "DATA": "{\n" + lines.replace("</", "<\\/") + "\n}",
        "CONTROLS": "\n".join(control(key, choices) for key, choices in values().items()),
        "PUBLISHED": published(),
        **{name.upper(): str(number) for name, number in experts("moe_gpt").items()},
        "INNER_STEPS": str(transformer.INNER_STEPS),
        **{name.upper(): legend(name) for name in ("strategies", "shares", "memory")},
    }
    text = TEMPLATE.read_text()
    for name, part in parts.items():
        assert text.count(f"@{name}@") == 1, f"{TEMPLATE} must have one @{name}@"
        text = text.replace(f"@{name}@", part)
    return text


def write() -> Path:
    """Write docs/explorer.html, and return its path."""
    PAGE.write_text(page())
    return PAGE
