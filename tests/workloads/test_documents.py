"""Which columns are read, where a document ends, and how a chat becomes text."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import tokenizers
from common import UserError
from common.workloads import text
from tokenizers import decoders, models, pre_tokenizers, trainers

BODIES = [f"document {i}: {'ab ' * (i % 5)}é" for i in range(60)]
CHATS = [[{"role": "user", "content": f"ab {i}"}, {"role": "assistant", "content": "é"}] for i in range(60)]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token if loop.last }}{% endfor %}"
)


def write_tokenizer(folder: Path, special: list[str], facts: dict[str, Any] | None = None) -> Path:
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        BODIES,
        trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False),
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    if facts is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return folder / "tokenizer.json"


def write_rows(folder: Path, **columns: list[Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation"):
        datasets.Dataset.from_dict(columns).to_parquet(folder / f"{split}.parquet")
    return folder


def decoded(folder: Path, tokenizer: Path, columns: str = "") -> str:
    split, _ = text.load(str(folder), 8, str(tokenizer), columns)
    model = tokenizers.Tokenizer.from_file(str(tokenizer))
    return model.decode(np.asarray(split.tokens).tolist(), skip_special_tokens=False)


@pytest.mark.parametrize(
    ("special", "facts", "end"),
    [
        (["<s>", "</s>"], None, "</s>"),
        (["<|im_end|>", "<|endoftext|>"], None, "<|endoftext|>"),
        (["<|im_end|>", "<|endoftext|>"], {"eos_token": "<|im_end|>"}, "<|im_end|>"),
        (["<stop>"], {"eos_token": {"content": "<stop>", "special": True}}, "<stop>"),
        (["</s>"], {"eos_token": "#"}, "#"),  # in the vocabulary, though not added to it
    ],
)
def test_each_document_ends(
    special: list[str], facts: dict[str, Any] | None, end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_rows(tmp_path / "data", body=BODIES)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", special, facts)
    assert decoded(folder, tokenizer) == "".join(body + end for body in BODIES)
    assert f"; each row ends with {end}\n" in capsys.readouterr().out


def test_a_model_of_ones_own_is_told_what_it_gets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the inputs' shape, which another model may not take, and of the flag for the usual one."""
    folder = write_rows(tmp_path / "data", body=BODIES)
    for attend, inputs in (("auto", "(b, 2, T)"), ("row", "(b, T)")):
        train, _ = text.load(str(folder), 8, attend=attend)
        read, _ = train.read(np.zeros(3, int), np.arange(3))
        assert read.shape == ((3, 2, 8) if inputs == "(b, 2, T)" else (3, 8))
        said = capsys.readouterr().out
        assert ("inputs are (b, 2, T), tokens and their positions; inputs (b, T), " in said) == (attend == "auto")
        assert ("with --attend row\n" in said) == (attend == "auto")


def test_without_an_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tokenizer that has no such token, and lines, which are no documents."""
    folder = write_rows(tmp_path / "data", body=BODIES)
    assert decoded(folder, write_tokenizer(tmp_path / "none", ["<pad>"])) == "".join(f"{body}\n" for body in BODIES)
    assert "; no token ends a document: name one as eos_token in a tokenizer_config.json" in capsys.readouterr().out
    unknown = write_tokenizer(tmp_path / "unknown", ["</s>"], {"eos_token": "<stop>"})
    with pytest.raises(UserError, match=r"has no token '<stop>', which tokenizer_config.json beside it names"):
        text.load(str(folder), 8, str(unknown))
    lines = tmp_path / "lines"
    lines.mkdir()
    for split in ("train", "validation"):
        (lines / f"{split}.txt").write_text("".join(f"{body}\n" for body in BODIES))
    assert decoded(lines, write_tokenizer(tmp_path / "end", ["</s>"])) == "".join(f"{body}\n" for body in BODIES)
    assert "; rows are lines, without an end\n" in capsys.readouterr().out


def test_other_end_is_packed_anew(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "data", body=BODIES)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", ["</s>", "<stop>"])
    before = decoded(folder, tokenizer)
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<stop>"}))
    assert decoded(folder, tokenizer) == before.replace("</s>", "<stop>")


def test_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_rows(tmp_path / "data", id=[*range(60)], title=[f"t{i}" for i in range(60)], body=BODIES)
    split, _ = text.load(str(folder), 8, columns="title, body")
    wanted = "".join(f"t{i}\n{body}\n" for i, body in enumerate(BODIES))
    assert bytes(split.tokens).decode() == wanted
    assert split.tokens.dtype == np.uint8
    assert "; columns 'title', 'body' (not 'id')\n" in capsys.readouterr().out
    split, _ = text.load(str(folder), 8)
    assert bytes(split.tokens).decode() == "".join(f"{body}\n" for body in BODIES)
    assert "; column 'body' (not 'id', 'title')\n" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"--text-columns titel: 'titel' is no column .*, which has 'title', 'body'"):
        text.load(str(folder), 8, columns="titel")
    with pytest.raises(UserError, match="--text-columns id: 'id' is no column of strings"):
        text.load(str(folder), 8, columns="id")
    with pytest.raises(UserError, match="--text-columns body,body has 'body' twice"):
        text.load(str(folder), 8, columns="body,body")
    with pytest.raises(UserError, match="--text-columns body cannot be used with --data stdlib"):
        text.load("stdlib", 8, columns="body")


def test_missing_texts(tmp_path: Path) -> None:
    """A row without any text is no document; an empty one is."""
    folder = write_rows(tmp_path / "data", title=[None, "a", None, ""] * 9, body=["b", None, None, ""] * 9)
    split, _ = text.load(str(folder), 8, columns="title,body")
    assert bytes(split.tokens).decode() == "b\na\n\n\n" * 9
    split, _ = text.load(str(folder), 8, columns="body")
    assert bytes(split.tokens).decode() == "b\n\n" * 9


def test_lone_row_of_several_columns_is_not_cut(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    datasets.Dataset.from_dict({"title": ["t" * 90], "body": ["b" * 900]}).to_parquet(folder / "train.parquet")
    assert len(text.load(str(folder), 8, columns="body")[1].tokens) == 91
    with pytest.raises(UserError, match=r"has 1 row\(s\) and no validation split"):
        text.load(str(folder), 8, columns="title,body")


def test_column_is_missing_in_the_validation_split(tmp_path: Path) -> None:
    rows = {"train": datasets.Dataset.from_dict({"a": BODIES}), "validation": datasets.Dataset.from_dict({"b": BODIES})}
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "data")
    with pytest.raises(UserError, match="the validation split has no column 'a', which is read for training"):
        text.load(str(tmp_path / "data"), 8)


def test_chat_as_transformers_writes_it(tmp_path: Path) -> None:
    """Its own filter for JSON, and the special tokens, which are a part of what is kept."""
    folder = write_rows(tmp_path / "data", conversation=[[{"role": "user", "content": "<é&>"}]] * 60)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", ["<s>", "<b>"], {"bos_token": "<s>"})
    (tokenizer.parent / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0] | tojson }}")
    wanted = '{"content": "<é&>", "role": "user"}'
    found = decoded(folder, tokenizer, "conversation").splitlines()[0]
    assert found.startswith("<s>{")
    assert json.loads(found[3:]) == json.loads(wanted)
    assert "<é&>" in found
    (tokenizer.parent / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<b>"}))
    assert decoded(folder, tokenizer, "conversation").startswith("<b>{")


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "tokenizer_config.json, by name"])
def test_chats(place: str, tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "data", conversation=CHATS)
    named = [
        {"name": "tool_use", "template": "{{ raise_exception('other') }}"},
        {"name": "default", "template": TEMPLATE},
    ]
    source = {"tokenizer_config.json": TEMPLATE, "tokenizer_config.json, by name": named}.get(place)
    facts = {"eos_token": "</s>"} | ({"chat_template": source} if source else {})
    tokenizer = write_tokenizer(tmp_path / "tokenizer", ["<|user|>", "<|assistant|>", "</s>"], facts)
    if place.endswith(".jinja"):
        (tokenizer.parent / place).write_text(TEMPLATE)
    assert decoded(folder, tokenizer, "conversation") == "".join(f"<|user|>ab {i}<|assistant|>é</s>" for i in range(60))
    split, _ = text.load(str(folder), 8, str(tokenizer), "conversation")
    model = tokenizers.Tokenizer.from_file(str(tokenizer))
    assert (split.tokens == model.token_to_id("</s>")).sum() == 60, "once, where the template has it already"
    assert split.tokens[0] == model.token_to_id("<|user|>")


def test_refused_chats(tmp_path: Path) -> None:
    folder = str(write_rows(tmp_path / "data", conversation=CHATS))
    tokenizer = write_tokenizer(tmp_path / "tokenizer", ["</s>"])
    with pytest.raises(UserError, match="its chats are read with --text-columns conversation"):
        text.load(folder, 8, str(tokenizer))
    for path in ("", str(tokenizer)):
        with pytest.raises(UserError, match=r"the chats of --data .* need the template of a tokenizer"):
            text.load(folder, 8, path, "conversation")
    template = tokenizer.parent / "chat_template.jinja"
    for source, reason in (
        ("{{ messages", "its chat template cannot be read"),
        ("{{ raise_exception('no system') }}", "refuses a chat of --data .*: no system"),
        ("{{ messages[0].content + 1 }}", "the chat template fails on a chat"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "the chat template fails on a chat"),
    ):
        template.write_text(source)
        with pytest.raises(UserError, match=reason):
            text.load(folder, 8, str(tokenizer), "conversation")
    (tokenizer.parent / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="a file beside it cannot be read"):
        text.load(folder, 8, str(tokenizer), "conversation")
