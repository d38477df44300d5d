"""Fine-tuning gives the losses of trl's SFTTrainer and DPOTrainer, where these are right: one process, with padding."""

import copy
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
import tokenizers
import torch
import transformers
from common import seed
from common.train import sampler, schedule
from common.workloads import text
from tokenizers import models, pre_tokenizers

from tests.harness import runner
from tests.recipes.test_porting import port, train
from tests.workloads.test_documents import write_rows, write_tokenizer

pytestmark = [pytest.mark.rest, pytest.mark.filterwarnings("ignore::FutureWarning")]

STEPS = 20
SEQ_LEN = 96
RATE = 3e-3
WARMUP = 4
DECAY = 0.1
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{% endfor %}"
)
FACTS = {"eos_token": "<|im_end|>", "pad_token": "<pad>", "chat_template": TEMPLATE}
SIZES: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", ("--norm-eps", "1e-06")),
    "Qwen": ("Qwen2Config", "Qwen2ForCausalLM", ("--qkv-bias", "--norm-eps", "1e-06")),
}
ROUNDED = 2e-6  # transformers rounds its norms and rotary positions to float32


def chat(i: int) -> list[dict[str, str]]:
    """One or two answers, of unequal length; more than half a row, so that no two share one."""
    words = [f"w{seed.mix_ints(3, i, k) % 97}" for k in range(9)]
    turns = [{"role": "user", "content": " ".join(words)}, {"role": "assistant", "content": words[3] * (1 + i % 3)}]
    if i % 2:
        turns += [{"role": "user", "content": words[4]}, {"role": "assistant", "content": f"{i}"}]
    return turns


def write_model(folder: Path, family: str, vocab_size: int) -> Any:
    config, kind = (getattr(transformers, name) for name in FAMILIES[family][:2])  # slow to import
    torch.manual_seed(0)
    positions = {"rope_type": "default", "rope_theta": 1e4}
    model = kind(config(**SIZES, vocab_size=vocab_size, tie_word_embeddings=False, rope_parameters=positions))
    model.save_pretrained(folder)
    return model.double()


def flags(family: str, batch: int, first: Path) -> tuple[str, ...]:
    sizes = ("--num-layers", "2", "--num-heads", "4", "--width", "40", "--mlp-width", "44", "--num-kv-heads", "2")
    batches = ("--global-batch-size", str(batch), "--lr-reference-batch", str(batch), "--micro-batch-size", "1")
    steps = ("--max-steps", str(STEPS), "--lr", str(RATE), "--warmup-steps", str(WARMUP), "--weight-decay", str(DECAY))
    how = ("--seq-len", str(SEQ_LEN), "--init", str(first), "--dtype", "float64")
    return (*sizes, *FAMILIES[family][2], *batches, *steps, *how)


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_of_trl(family: str, tmp_path: Path) -> None:
    import trl  # takes seconds, which each collection of the tests would

    batch = 8
    chats = [chat(i) for i in range(STEPS * batch)]
    data = write_rows(tmp_path / "data", chat=chats)
    tokenizer_path = write_tokenizer(tmp_path / "tokenizer", ["<|im_start|>", "<|im_end|>", "<pad>"], FACTS)
    model = write_model(tmp_path / "first", family, 300)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_path), **FACTS)
    # The chats in the order of the recipe's samples.
    rows, _ = text.load(str(data), SEQ_LEN, str(tokenizer_path), "chat", "documents", "answers")
    assert len(rows) == len(chats), "one in each row"
    order = sampler.permutation(len(rows), 0, 0)
    inputs, _ = rows.read(order * 0, order)
    numbers = {
        tuple(tokenizer.apply_chat_template(one, return_dict=True)["input_ids"][:-1]): i for i, one in enumerate(chats)
    }
    found = [numbers[tuple(row[0, : row[1].argmax() + 1].tolist())] for row in inputs]
    settings = trl.SFTConfig(**settings_of_trl(tmp_path, batch), assistant_only_loss=True, packing=False)
    columns = {"messages": [chats[i] for i in found]}
    wanted = losses_of_trl(trl.SFTTrainer, model, settings, tokenizer, columns)
    how = ("--loss-on", "answers", "--text-columns", "chat", "--tokenizer", str(tokenizer_path), "--data", str(data))
    train(
        runner.ROOT / "recipes" / "ddp_gpt" / "train.py",
        2,
        tmp_path / "run",
        *how,
        *flags(family, batch, tmp_path / "first"),
    )
    losses = runner.records(tmp_path / "run", "train/loss")
    assert [*losses.values()] == pytest.approx(wanted, rel=ROUNDED)
    assert losses[STEPS] < 0.9 * losses[1]


# Of a prompt that counted, nobody would see anything: it adds the same to both answers.
MUTANTS = {
    "another beta": ("BETA = 0.1 ", "BETA = 0.101 "),
    "the reference moves": ("before = reference(args, tokens.device)", "before = model"),
    "the first token of an answer does not count": ("len(tokens)) < len(prompt)", "len(tokens)) <= len(prompt)"),
    "a mean over tokens": ("moved = tokens.shape[1] * (", "moved = ("),
    "the answers are exchanged": ("chosen, rejected = moved", "rejected, chosen = moved"),
}


@pytest.mark.parametrize(("family", "recipe"), [("Llama", "ddp_gpt"), ("Qwen", "fsdp_gpt")])
def test_preferences_of_trl(family: str, recipe: str, tmp_path: Path) -> None:
    """The example of docs/examples.md, whose tokens are bytes; in one recipe, the losses of each mutant are others."""
    import trl  # takes seconds, which each collection of the tests would

    batch = 4
    model = write_model(tmp_path / "first", family, 256)
    path = port("dpo", recipe, tmp_path)
    pairs = [pair(i) for i in sampler.permutation(96, 0, 0)[: STEPS * batch]]
    columns = {name: [[pair[name]] for pair in pairs] for name in pairs[0]}
    settings = trl.DPOConfig(**settings_of_trl(tmp_path, batch), beta=0.1)
    wanted = losses_of_trl(trl.DPOTrainer, model, settings, byte_tokenizer(), columns, ref_model=copy.deepcopy(model))
    how = flags(family, batch, tmp_path / "first")
    train(path, 2, tmp_path / "run", *how)
    losses = runner.records(tmp_path / "run", "train/loss")
    assert [*losses.values()] == pytest.approx(wanted, rel=ROUNDED)
    assert losses[STEPS] < 0.9 * losses[1]
    source = path.read_text()
    for name, (old, new) in MUTANTS.items() if recipe == "ddp_gpt" else ():
        assert source.count(old) == 1, name
        path.write_text(source.replace(old, new))
        train(path, 1, tmp_path / name, *how, "--stop-after", "3")
        assert [*runner.records(tmp_path / name, "train/loss").values()] != pytest.approx(wanted[:3], rel=ROUNDED), name


def pair(i: int) -> dict[str, dict[str, str]]:
    """The texts of a sample of the example."""
    return {
        "prompt": {"role": "user", "content": f"{i}?"},
        "chosen": {"role": "assistant", "content": "odd" if i % 2 else "even"},
        "rejected": {"role": "assistant", "content": "who knows"},
    }


def byte_tokenizer() -> Any:
    """Of tokens that are bytes, and a template that writes the texts alone. Nothing reads the padding."""
    letters = [
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(chr(i))[0][0]
        for i in range(128)
    ]
    model = tokenizers.Tokenizer(models.BPE({one: i for i, one in enumerate(letters)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model,
        eos_token=letters[0],
        pad_token=letters[0],
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    )


def settings_of_trl(out: Path, batch: int) -> dict[str, Any]:
    return {
        "output_dir": str(out / "trl"),
        "per_device_train_batch_size": batch,
        "max_steps": STEPS,
        "max_grad_norm": 1.0,
        "train_sampling_strategy": "sequential",
        "max_length": None,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def losses_of_trl(
    trainer: Any, model: Any, settings: Any, tokenizer: Any, columns: Mapping[str, list[Any]], **more: Any
) -> list[float]:
    """Of its own preparation of the texts, collator and loss, with our optimizer and schedule."""
    losses = []

    class Recording(trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(*args, **kwargs)
            losses.append((found[0] if isinstance(found, tuple) else found).item())
            return found

    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    factor = functools.partial(schedule.warmup_cosine, warmup_steps=WARMUP, max_steps=STEPS)
    Recording(
        model=model,
        args=settings,
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=tokenizer,
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)),
        **more,
    ).train()
    assert all(map(math.isfinite, losses))
    return losses
