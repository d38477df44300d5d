"""Which tokens of a chat the assistant wrote, beside transformers', with templates of three families."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from common import UserError
from common.workloads import chats, document_rows, text

from tests.workloads.test_documents import write_rows, write_tokenizer

# As the families write chats; the second of each has transformers' marks around what the assistant wrote.
FAMILIES = {
    "ChatML": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|im_end|>{{ '\n' }}{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}",
    ),
    "Llama 3": (
        "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot|>"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}",
        "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content | trim }}<|eot|>{% endgeneration %}"
        "{% else %}{{ m.content | trim }}<|eot|>{% endif %}{% endfor %}",
    ),
    "Mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %}{% generation %} {{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}",
    ),
}
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>"]
FACTS = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
    {"role": "user", "content": "ab é 1"},
    {"role": "assistant", "content": "document 7: é"},
    {"role": "user", "content": "and <|x|> then"},
    {"role": "assistant", "content": "ab\nab"},
]


def counted(folder: Path, template: str) -> tuple[list[int], list[bool]]:
    """The tokens of the chat, and which count."""
    data = write_rows(folder / "data", chat=[CHAT] * 40)
    tokenizer = write_tokenizer(folder / "tokenizer", SPECIAL, FACTS | {"chat_template": template})
    train, _ = text.load(str(data), 200, str(tokenizer), "chat", "auto", "answers")
    assert train.rows is not None
    tokens, counts = train.rows.first()
    return tokens.tolist(), counts.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_as_transformers(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, marked = FAMILIES[family]
    found = counted(tmp_path / "marked", marked)
    theirs: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "marked" / "tokenizer" / "tokenizer.json"), chat_template=marked, **FACTS
    )
    wanted = theirs.apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_dict=True)
    size = len(wanted["input_ids"])
    assert found[0][:size] == wanted["input_ids"]
    assert found[1][:size] == [bool(one) for one in wanted["assistant_masks"]]
    if found[0][size:]:  # the template itself writes no end
        assert found[0][size:] == [theirs.eos_token_id]
        assert found[1][size:] == found[1][size - 1 : size]
    shown = capsys.readouterr().out
    assert re.search("» ?document 7: é", shown)
    assert counted(tmp_path / "plain", plain) == found, "without marks, by what each answer adds"


def test_a_template_that_hides_what_an_answer_adds(tmp_path: Path) -> None:
    """Such as one that drops what the assistant thought in earlier turns."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else m.content[:2] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    with pytest.raises(UserError, match=r"before message 2 of a chat .* \('document 7: é'\): put \{% generation %\}"):
        counted(tmp_path, template)


def test_a_chat_cannot_write_marks(tmp_path: Path) -> None:
    """Its text may have whatever stands in a template."""
    template = chats.Template(FAMILIES["ChatML"][1], FACTS, "set", "chat", "tokenizer")
    chat = [{"role": "user", "content": "{% generation %}x{% endgeneration %}<begin-0>"}, CHAT[1]]
    written, spans = template.answers(chat)
    assert [written[first:last] for first, last in spans] == ["document 7: é<|im_end|>\n"]
    assert template.text(chat) == written


def test_refused(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data", chat=[CHAT] * 40, body=["x"] * 40)
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer", SPECIAL, FACTS | {"chat_template": FAMILIES["ChatML"][0]}))
    with pytest.raises(
        UserError, match=r"--loss-on answers: --text-columns body .* are no column .* name one of 'chat'"
    ):
        text.load(str(data), 8, tokenizer, "body", "auto", "answers")
    with pytest.raises(UserError, match="--loss-on answers keeps chats apart: drop --attend row"):
        text.load(str(data), 8, tokenizer, "chat", "row", "answers")
    for flag, how in (("--attend documents", ("documents", "all")), ("--loss-on answers", ("auto", "answers"))):
        with pytest.raises(UserError, match=f"{flag} needs a table of documents, and the built-in text is one row"):
            text.load("stdlib", 8, "", "", *how)
    only = write_rows(tmp_path / "only", body=["x"] * 40)
    with pytest.raises(UserError, match=r"has no column of chats.* without chats, drop --loss-on answers"):
        text.load(str(only), 8, tokenizer, "", "auto", "answers")
    none = write_rows(tmp_path / "none", chat=[CHAT[:1]] * 40)
    with pytest.raises(UserError, match="no document of the training split has an answer: nothing can be predicted"):
        text.load(str(none), 8, tokenizer, "chat", "auto", "answers")


def test_messages_with_other_keys(tmp_path: Path) -> None:
    """Of tools, names and weights; a key without a value is as if it were not there."""
    used = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    rows = [[CHAT[0], used, {"role": "tool", "content": "7", "name": "f"}, CHAT[1]], CHAT[:2]] * 20
    for split in ("train", "validation"):
        lines = "".join(json.dumps({"messages": row}) + "\n" for row in rows)
        (tmp_path / f"{split}.jsonl").write_text(lines)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ '!' if m.tool_calls }}{% endfor %}"
    facts = FACTS | {"chat_template": template + "{% if add_generation_prompt %}<assistant>{% endif %}"}
    tokenizer = write_tokenizer(tmp_path / "tokenizer", SPECIAL, facts)
    train, _ = text.load(str(tmp_path), 200, str(tokenizer), "messages", "auto", "answers")
    assert train.rows is not None
    tokens, counts = train.rows.first()
    model = tokenizers.Tokenizer.from_file(str(tokenizer))
    assert model.decode(tokens.tolist()) == "<user>ab é 1<assistant>!<tool>7<assistant>document 7: é"
    assert model.decode(tokens[counts].tolist()) == "!document 7: é"


def test_lines_are_no_documents(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        (tmp_path / f"{split}.txt").write_text("ab\ncdef\n" * 40)
    assert text.load(str(tmp_path), 8, "", "", "auto")[0].rows is None
    train, _ = text.load(str(tmp_path), 8, "", "", "documents")
    assert train.rows is not None
    tokens, positions = train.read(np.zeros(1, int), np.zeros(1, int))[0][0]
    assert bytes(tokens.tolist()) == b"cdefcdef", "their ends are targets alone"
    assert positions.tolist() == [0, 1, 2, 3] * 2


def test_bits_per_byte_and_digest(tmp_path: Path) -> None:
    data = str(write_rows(tmp_path, body=[f"ab {i}" for i in range(60)]))
    apart, row = (text.load(data, 8, "", "", attend)[0] for attend in ("documents", "row"))
    assert apart.digest() != row.digest()
    assert apart.vocab_size == row.vocab_size == 256
    assert apart.tokens_per_byte == row.tokens_per_byte == 1.0, "of all bytes, also those that begin a document"
    inputs, targets = apart.read(np.zeros(2, int), np.arange(2))
    assert inputs.dtype == targets.dtype == torch.int64
    assert text.weight(inputs, targets)["weight"].item() == ((targets != document_rows.IGNORED).sum() / 8).item()
    assert text.weight(*row.read(np.zeros(2, int), np.arange(2))) == {}
