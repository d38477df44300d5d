"""The bare twins beside the recipes, with small constants; and the flags with which a recipe trains as its twin."""

from pathlib import Path
from types import SimpleNamespace

from tests.harness import runner

TWINS = sorted(path.parent.name for path in (runner.ROOT / "recipes").glob("*/bare.py"))
BATCH, MICRO = 16, 2  # samples of a step, of a micro-batch
STRATEGY = {
    "allreduce_resnet": ("--bucket-mb", "0.001"),  # a message for each gradient
    "multinode_resnet": ("--micro-batch-size", str(MICRO)),
    "tensor_gpt": ("--tp", "{tp}"),
    "pipeline_gpt": ("--pp", "{size}", "--micro-batch-size", str(MICRO), "--schedule", "1F1B"),
    "context_gpt": ("--cp", "{size}", "--cp-kind", "allgather"),
    "diloco_gpt": ("--inner-steps", "2", "--outer-lr", "0.7", "--outer-momentum", "0.9"),
}
CONSTANTS = {  # of the twins
    "MICRO_BATCH": MICRO,
    "MICRO_BATCHES": BATCH // MICRO,
    "INNER_STEPS": 2,
    "ENVS": 12,
    "MINIBATCH": 96,
}


def flags(recipe: str, size: int) -> tuple[str, ...]:
    """Those with which a recipe's strategy is its twin's, on some ranks."""
    return tuple(flag.format(size=size, tp=min(2, size)) for flag in STRATEGY.get(recipe, ()))


SMALL = {"width=192": "width=32", "seq_len=128": "seq_len=16"}  # of a language model


def write_small(recipe: str, folder: Path) -> Path:
    """A twin's file in a folder, with a small language model if it trains one."""
    text = (runner.ROOT / "recipes" / recipe / "bare.py").read_text()
    if runner.workload(recipe) == "gpt":
        for old, new in SMALL.items():
            assert text.count(old) == 1
            text = text.replace(old, new)
    path = folder / "bare.py"
    path.write_text(text)
    return path


def load(recipe: str, mutant: tuple[str, str] = ("", "")) -> SimpleNamespace:
    """What a twin defines, with small constants; mutant: a text that stands there once, and what replaces it."""
    source = (runner.ROOT / "recipes" / recipe / "bare.py").read_text()
    assert not mutant[0] or source.count(mutant[0]) == 1
    twin = SimpleNamespace(__name__="twin")
    exec(source.replace(*mutant) if mutant[0] else source, vars(twin))
    vars(twin).update({name: value for name, value in CONSTANTS.items() if hasattr(twin, name)})
    return twin
