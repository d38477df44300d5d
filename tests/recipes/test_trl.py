"""Fine-tuning on answers gives the losses of trl's SFTTrainer, where that is right: in one process, with padding."""

import functools
import math
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
import trl
from common import seed
from common.train import sampler, schedule
from common.workloads import text

from tests.harness import runner
from tests.workloads.test_documents import write_rows, write_tokenizer

pytestmark = [pytest.mark.rest, pytest.mark.filterwarnings("ignore::FutureWarning")]

STEPS = 20
BATCH = 8
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
    "vocab_size": 300,
}
FAMILIES = {
    "Llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, ("--norm-eps", "1e-06")),
    "Qwen": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, ("--qkv-bias", "--norm-eps", "1e-06")),
}


def chat(i: int) -> list[dict[str, str]]:
    """One or two answers, of unequal length; more than half a row, so that no two share one."""
    words = [f"w{seed.mix_ints(3, i, k) % 97}" for k in range(9)]
    turns = [{"role": "user", "content": " ".join(words)}, {"role": "assistant", "content": words[3] * (1 + i % 3)}]
    if i % 2:
        turns += [{"role": "user", "content": words[4]}, {"role": "assistant", "content": f"{i}"}]
    return turns


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_of_trl(family: str, tmp_path: Path) -> None:
    config, kind, flags = FAMILIES[family]
    chats = [chat(i) for i in range(STEPS * BATCH)]
    data = write_rows(tmp_path / "data", chat=chats)
    tokenizer_path = write_tokenizer(tmp_path / "tokenizer", ["<|im_start|>", "<|im_end|>", "<pad>"], FACTS)
    torch.manual_seed(0)
    model = kind(
        config(**SIZES, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    )
    model.save_pretrained(tmp_path / "first")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_path), **FACTS)
    # The chats in the order of the recipe's samples.
    train, _ = text.load(str(data), SEQ_LEN, str(tokenizer_path), "chat", "documents", "answers")
    assert len(train) == len(chats), "one in each row"
    order = sampler.permutation(len(train), 0, 0)
    inputs, _ = train.read(order * 0, order)
    numbers = {
        tuple(tokenizer.apply_chat_template(one, return_dict=True)["input_ids"][:-1]): i for i, one in enumerate(chats)
    }
    found = [numbers[tuple(row[0, : row[1].argmax() + 1].tolist())] for row in inputs]
    wanted = losses_of_trl(model.double(), tokenizer, [chats[i] for i in found], tmp_path / "trl")
    sizes = ("--num-layers", "2", "--num-heads", "4", "--width", "40", "--mlp-width", "44", "--num-kv-heads", "2")
    how = ("--loss-on", "answers", "--text-columns", "chat", "--tokenizer", str(tokenizer_path), "--data", str(data))
    batches = ("--global-batch-size", str(BATCH), "--lr-reference-batch", str(BATCH), "--micro-batch-size", "1")
    steps = ("--max-steps", str(STEPS), "--lr", str(RATE), "--warmup-steps", str(WARMUP), "--weight-decay", str(DECAY))
    result = runner.run_recipe(
        "ddp_gpt",
        2,
        *(*how, *batches, *steps, *sizes, *flags, "--seq-len", str(SEQ_LEN), "--log-every", "1"),
        *("--init", str(tmp_path / "first"), "--dtype", "float64", "--out", str(tmp_path), "--name", "run"),
    )
    assert result.ok, str(result)
    losses = runner.records(tmp_path / "run", "train/loss")
    # transformers rounds its norms and rotary positions to float32.
    assert [*losses.values()] == pytest.approx(wanted, rel=2e-6)
    assert losses[STEPS] < 0.9 * losses[1]


def losses_of_trl(model: Any, tokenizer: Any, chats: list[Any], out: Path) -> list[float]:
    """Of its own preparation of the chats, collator and loss, with our optimizer and schedule."""
    losses = []

    class Recording(trl.SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(*args, **kwargs)
            losses.append((found[0] if isinstance(found, tuple) else found).item())
            return found

    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    factor = functools.partial(schedule.warmup_cosine, warmup_steps=WARMUP, max_steps=STEPS)
    settings = trl.SFTConfig(
        output_dir=str(out),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        max_grad_norm=1.0,
        assistant_only_loss=True,
        train_sampling_strategy="sequential",
        max_length=None,
        packing=False,
        bf16=False,
        use_cpu=True,
        activation_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Recording(
        model=model,
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"messages": chats}),
        processing_class=tokenizer,
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)),
    )
    trainer.train()
    assert all(map(math.isfinite, losses))
    return losses
