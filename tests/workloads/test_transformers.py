"""A model of transformers, trained by any GPT recipe, writes the same text as one that a plain loop has trained."""

import json
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from common import UserError
from common.state import start
from common.train import sampler
from common.workloads import gpt, gpt_names, text
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tools.llama import convert as llama

from tests.conftest import each_recipe
from tests.harness import runner

pytestmark = [
    pytest.mark.usefixtures("group"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # as the commands mean it
]

STEPS = 20
BATCH = 8
SEQ_LEN = 16
RATE = 5e-3
WARMUP = 5
CLIP = 1.0
DECAY = 0.1
PROMPTS = ("def ", "the")
SETTINGS = {"do_sample": False, "max_new_tokens": 24}


class Trained(NamedTuple):
    """What the plain loop leaves behind."""

    folder: Path  # where it started from: a Hugging Face folder
    losses: list[float]
    texts: list[str]  # that it writes after the training


def train_tokenizer(data: Path, folder: Path) -> Path:
    """A tokenizer with an end of text, and its settings beside it, as a Hugging Face folder has them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(data / "train.txt")], trainer)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>", model_max_length=77
    ).save_pretrained(folder)
    return folder / "tokenizer.json"


def written(folder: Path) -> list[str]:
    """What a pipeline writes that knows nothing but the folder."""
    writer = transformers.pipeline("text-generation", str(folder), device="cpu")
    return [writer(prompt, **SETTINGS)[0]["generated_text"] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def trained(small_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The training as one would write it with transformers, for one process."""
    folder = tmp_path_factory.mktemp("plain")
    tokenizer = train_tokenizer(small_text, folder / "first")
    sizes: dict[str, Any] = {"hidden_size": 40, "intermediate_size": 44, "num_hidden_layers": 3}
    config = transformers.LlamaConfig(
        **sizes,
        vocab_size=320,  # more than the tokenizer's 300, as Qwen's are
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder / "first")
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    train, _ = text.load(str(small_text), SEQ_LEN, str(tokenizer))
    order = sampler.permutation(len(train), 0, 0)
    losses = []
    for step in range(STEPS):
        batch = order[step * BATCH : (step + 1) * BATCH]
        tokens, targets = train.read(batch * 0, batch)
        loss = torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        warm = step >= WARMUP
        turn = math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))
        for group in optimizer.param_groups:
            group["lr"] = RATE * (0.5 * (1 + turn) if warm else (step + 1) / (WARMUP + 1))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(folder / "last")
    train_tokenizer(small_text, folder / "last")
    return Trained(folder / "first", losses, written(folder / "last"))


@pytest.mark.parametrize("recipe", each_recipe([name for name in runner.SUPERVISED if runner.workload(name) == "gpt"]))
def test_same_text(recipe: str, trained: Trained, small_text: Path, tmp_path: Path) -> None:
    start, out = tmp_path / "start", tmp_path / "out"
    llama.import_(trained.folder, start)
    flags = ["--resume", str(start), "--config", str(start / "config.json"), "--data", str(small_text)]
    flags += ["--tokenizer", str(trained.folder / "tokenizer.json"), "--seq-len", str(SEQ_LEN), "--dtype", "float32"]
    flags += ["--max-steps", str(STEPS), "--global-batch-size", str(BATCH), "--micro-batch-size", "2"]
    flags += ["--lr", str(RATE), "--lr-reference-batch", str(BATCH), "--warmup-steps", str(WARMUP)]
    flags += ["--max-grad-norm", str(CLIP), "--weight-decay", str(DECAY)]
    flags += [
        "--log-every",
        "1",
        "--eval-every",
        "1000",
        "--save-every",
        "1000",
        "--out",
        str(tmp_path),
        "--name",
        "run",
    ]
    strategy = runner.layout(recipe, 2).strategy  # replicas that train apart would learn something else
    result = runner.run_recipe(recipe, 2, *flags, *strategy)
    assert result.ok, str(result)
    losses = runner.records(tmp_path / "run", "train/loss")
    assert list(losses.values()) == pytest.approx(trained.losses, rel=1e-4)
    assert losses[STEPS] < 0.9 * losses[1]
    llama.export(tmp_path / "run", out)
    assert written(out) == trained.texts
    assert written(trained.folder) != trained.texts, "before the training, it writes something else"


def test_export_carries_what_lies_beside_its_tokenizer(trained: Trained, tmp_path: Path) -> None:
    """Chat templates, special tokens and generation settings."""
    first = Path(shutil.copytree(trained.folder, tmp_path / "first"))
    start = tmp_path / "start"
    llama.import_(first, start)
    flags = json.loads((start / "config.json").read_text())["args"]
    flags["tokenizer"] = str(first / "tokenizer.json")
    (start / "config.json").write_text(json.dumps({"args": flags}))
    for path in (first / "chat_template.jinja", first / "generation_config.json"):
        before = path.read_text() if path.exists() else ""
        path.write_text(before or "{{ messages[0]['content'] }}<|end|>")
    llama.export(start, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.model_max_length) == ("<|end|>", 0, 77)
    assert tokenizer.apply_chat_template([{"content": "hi"}], tokenize=False) == "hi<|end|>"
    settings = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert settings.eos_token_id == 0
    (first / "generation_config.json").unlink()  # then the ids come from the names of the special tokens
    llama.export(start, tmp_path / "second")
    settings = transformers.GenerationConfig.from_pretrained(tmp_path / "second")
    assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (0, 0, 0)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "second")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 0, 0)
    names = json.loads((first / "tokenizer.json").read_text().replace("<|end|>", "</s>"))  # as training has found it
    (first / "tokenizer.json").write_text(json.dumps(names))
    (first / "tokenizer_config.json").unlink()
    llama.export(start, tmp_path / "bare")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "bare").eos_token == "</s>"
    (first / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    llama.export(start, tmp_path / "unnamed")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "unnamed").eos_token == "</s>"
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "bare").eos_token_id == 0
    (first / "tokenizer_config.json").write_text("[")
    with pytest.raises(UserError, match=r"--tokenizer \S+tokenizer\.json or a file beside it cannot be used: JSON"):
        llama.export(start, tmp_path / "third")


def test_bytes_are_tokens_that_transformers_reads() -> None:
    """A model without --tokenizer can be exported and used all the same."""
    tokenizer = Tokenizer.from_str(json.dumps(llama.byte_tokenizer()))
    sentence = "Grüße,\tWelt!\n  x\x00\x7f 1é漢字😀\xad"
    assert tokenizer.encode(sentence).ids == list(sentence.encode())
    assert tokenizer.decode(list(sentence.encode())) == sentence
    assert sorted(tokenizer.get_vocab().values()) == list(range(256))


@pytest.mark.parametrize("recipe", each_recipe(["ddp_gpt", "pipeline_gpt", "tensor_gpt"]))
def test_init_takes_the_folder_itself(recipe: str, trained: Trained, small_text: Path, tmp_path: Path) -> None:
    """Without an import; and what the folder's model has otherwise is refused with the flags that would be right."""
    flags = ["--init", str(trained.folder), "--data", str(small_text), "--seq-len", str(SEQ_LEN), "--dtype", "float32"]
    flags += ["--tokenizer", str(trained.folder / "tokenizer.json"), "--num-heads", "4", "--num-kv-heads", "2"]
    flags += ["--vocab-size", "320", "--width", "40", "--mlp-width", "44", "--norm-eps", "1e-6", "--num-layers", "3"]
    flags += ["--max-steps", "1", "--global-batch-size", str(BATCH), "--micro-batch-size", "2", "--log-every", "1"]
    flags += ["--out", str(tmp_path), "--name", "run"]
    result = runner.run_recipe(recipe, 2, *flags, "--tied")
    refusal = "to be the model of its config.json, --tied True must be False, --rope-base 10000.0 must be 500000.0"
    assert f"--init {trained.folder}: {refusal}" in str(result)
    result = runner.run_recipe(recipe, 2, *flags, "--rope-base", "5e5")
    assert result.ok, str(result)
    assert f"init     30 of 30 tensors from {trained.folder}\n" in str(result)
    assert runner.records(tmp_path / "run", "train/loss") == {1: pytest.approx(trained.losses[0], rel=1e-5)}


def test_another_vocabulary_is_drawn_anew(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"num_layers": 3, "num_heads": 4, "width": 40, "num_kv_heads": 2, "mlp_width": 44, "norm_eps": 1e-6}
    model = gpt.GPT(gpt.Shape(400, **sizes, rope_base=5e5))
    before = model.head.weight.clone()
    start.begin_with(str(trained.folder), model)
    saved = load_file(trained.folder / "model.safetensors")
    for ours, theirs in gpt_names.names(model.shape).items():
        if ours not in ("embed.weight", "head.weight"):
            assert torch.equal(model.state_dict()[ours], saved[theirs]), ours
    assert torch.equal(model.head.weight, before)
    printed = capsys.readouterr().out
    assert "random: embed.weight (400, 40) (there: (320, 40)), head.weight (400, 40) (there: (320, 40))" in printed
    first = Path(shutil.copytree(trained.folder, tmp_path / "first"))
    config = json.loads((first / "config.json").read_text())
    for changes, refusal in (
        ({"model_type": "gpt2"}, "config.json has model_type 'gpt2', with learned positions"),
        ({"hidden_size": "x"}, "config.json has hidden_size 'x', which"),
    ):
        (first / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(UserError, match=rf"^--init {first}: {refusal}"):
            start.begin_with(str(first), model)
