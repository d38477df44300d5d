"""Folders of other programs' tokens are read as they are, and damaged ones are named."""

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import UserError
from common.workloads import packed, text, token_files

from tests.workloads.test_documents import write_tokenizer

TOKENS = np.random.default_rng(0).integers(0, 290, 1000)


def nanogpt(folder: Path, name: str, tokens: np.ndarray) -> None:
    tokens.astype(np.uint16).tofile(folder / f"{name}.bin")


def llmc(folder: Path, name: str, tokens: np.ndarray, large: bool = False) -> None:
    header = np.zeros(256, np.int32)
    header[:3] = (20240801, 7, len(tokens)) if large else (20240520, 1, len(tokens))
    (folder / f"corpus_{name}_000000.bin").write_bytes(
        header.tobytes() + tokens.astype(np.uint32 if large else np.uint16).tobytes()
    )


def llmc_large(folder: Path, name: str, tokens: np.ndarray) -> None:
    llmc(folder, name, tokens, large=True)


def megatron(folder: Path, name: str, tokens: np.ndarray, code: int = 4) -> None:
    """Documents of 100 tokens."""
    dtype = {4: np.int32, 8: np.uint16}[code]
    sizes = np.full(len(tokens) // 100, 100, np.int32)
    starts = np.arange(len(sizes), dtype=np.int64) * 100 * dtype().itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(sizes) + 1)
    index += sizes.tobytes() + starts.tobytes() + np.arange(len(sizes) + 1, dtype=np.int64).tobytes()
    (folder / f"{name}_text_document.idx").write_bytes(index)
    tokens.astype(dtype).tofile(folder / f"{name}_text_document.bin")


def megatron_16(folder: Path, name: str, tokens: np.ndarray) -> None:
    megatron(folder, name, tokens, code=8)


LAYOUTS = {nanogpt: "nanoGPT", llmc: "llm.c", llmc_large: "llm.c", megatron: "Megatron", megatron_16: "Megatron"}


@pytest.mark.parametrize("write", LAYOUTS)
def test_layouts(
    write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")  # other tests read the same tokens
    for name, tokens in (("train", TOKENS), ("val", TOKENS[:200])):
        write(tmp_path, name, tokens)
    train, validation = text.load(str(tmp_path), 10)
    inputs, targets = train.read(np.zeros(3), np.array([0, 7, 98]))
    for row, sequence in enumerate((0, 7, 98)):
        assert inputs[row].tolist() == TOKENS[10 * sequence : 10 * sequence + 10].tolist()
        assert targets[row].tolist() == TOKENS[10 * sequence + 1 : 10 * sequence + 11].tolist()
    assert (len(train), len(validation)) == (99, 19)
    assert train.vocab_size == TOKENS.max() + 1
    assert train.metrics({"loss": 1.0}) == {"loss": 1.0}
    said = capsys.readouterr().out
    assert "looking for the largest token" in said
    assert f"1,000 training and 200 validation tokens, vocabulary {TOKENS.max() + 1}; {LAYOUTS[write]}'s files" in said
    text.load(str(tmp_path), 10)
    assert "looking for" not in capsys.readouterr().out


def test_several_files_are_one_row(tmp_path: Path) -> None:
    nanogpt(tmp_path, "train_0", TOKENS[:333])
    nanogpt(tmp_path, "train_1", TOKENS[333:334])
    nanogpt(tmp_path, "train_2", TOKENS[334:])
    nanogpt(tmp_path, "val", TOKENS[:99])
    train, _ = text.load(str(tmp_path), 10)
    inputs, _ = train.read(np.zeros(99), np.arange(99))
    assert inputs.flatten().tolist() == TOKENS[:990].tolist()


def test_lone_file_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nanogpt(tmp_path, "tokens", TOKENS)
    train, validation = text.load(str(tmp_path), 10)
    assert len(train.tokens) == 900
    assert validation.read(np.zeros(1), np.array([0]))[0][0].tolist() == TOKENS[900:910].tolist()
    assert "the last tenth of the last file was held out" in capsys.readouterr().out


def test_tokenizer_tells_the_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nanogpt(tmp_path, "train", TOKENS)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", ["</s>"])
    train, _ = text.load(str(tmp_path), 10, str(tokenizer))
    assert train.vocab_size == 300
    assert "looking for" not in capsys.readouterr().out
    nanogpt(tmp_path, "train", TOKENS + 100)
    with pytest.raises(UserError, match=r"has token 389, and --tokenizer .* has only 300 tokens: give the tokenizer"):
        text.load(str(tmp_path), 10, str(tokenizer))


def test_large_token_between_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found when it is read, before an embedding is."""
    monkeypatch.setattr(token_files, "SAMPLE_BYTES", 2)
    tokens = TOKENS.copy()
    tokens[1] = 400
    nanogpt(tmp_path, "train", tokens)
    train, _ = text.load(str(tmp_path), 10, str(write_tokenizer(tmp_path / "tokenizer", ["</s>"])))
    train.read(np.zeros(1), np.array([1]))
    with pytest.raises(UserError, match="a token of --data is 400, and the vocabulary has only 300 tokens: give"):
        train.read(np.zeros(1), np.array([0]))


def test_test_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It validates only where nothing else does, and can be evaluated on its own."""
    for name, tokens in (("train", TOKENS), ("val", TOKENS[:200]), ("test", TOKENS[:300])):
        nanogpt(tmp_path, name, tokens)
    assert len(text.load(str(tmp_path), 10)[1].tokens) == 200
    assert len(text.load(f"{tmp_path}@test", 10)[1].tokens) == 300
    assert len(text.load(f"{tmp_path}@train", 10)[1].tokens) == len(TOKENS)
    with pytest.raises(UserError, match=rf"--data {tmp_path} has no split named dev, only test, train, validation"):
        text.load(f"{tmp_path}@dev", 10)
    (tmp_path / "val.bin").unlink()
    assert "is used as one" not in capsys.readouterr().out
    assert len(text.load(str(tmp_path), 10)[1].tokens) == 300
    assert "no validation split, so its test split is used as one" in capsys.readouterr().out


def test_digest_sees_another_token_and_another_end(tmp_path: Path) -> None:
    nanogpt(tmp_path, "train", TOKENS)
    nanogpt(tmp_path, "val", TOKENS[:200])
    before = text.load(str(tmp_path), 10)[0].digest()
    assert text.load(str(tmp_path), 10)[0].digest() == before
    changed = TOKENS.copy()
    changed[500] += 1
    for other in (changed, TOKENS[:-1]):
        nanogpt(tmp_path, "train", other)
        assert text.load(str(tmp_path), 10)[0].digest() != before


def test_digest_of_many_files_reads_two_pieces_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand files of llm.c would be GBs at every start otherwise."""
    monkeypatch.setattr(token_files, "SAMPLE_BYTES", 64)
    files = [(Path(f"{i}.bin"), TOKENS.astype(np.uint16)) for i in range(100)]

    def digest(file: int, position: int) -> str:
        changed = TOKENS.astype(np.uint16)
        changed[position] += 1
        return token_files.Tokens([*files[:file], (files[file][0], changed), *files[file + 1 :]]).digest

    before = token_files.Tokens(files).digest
    assert digest(3, 0) != before
    assert digest(99, -1) != before
    assert digest(3, 500) == before, "the middle is not read"


@pytest.mark.parametrize(
    ("write", "file", "change", "message"),
    [
        (llmc, "corpus_train_000000.bin", lambda old: old[:4] + b"\x02" + old[5:], "has the header 20240520 version 2"),
        (
            megatron,
            "train_text_document.idx",
            lambda old: old[:25] + b"\x10" + old[26:],
            "for 1152921504606846986 sequences: it is cut off",
        ),
        (megatron, "train_text_document.idx", lambda old: old[:-20], "has 222 bytes instead of 242 for 10 sequences"),
        (nanogpt, "train.bin", lambda old: old[:-1], "train.bin has 1999 bytes: .* 16-bit tokens"),
        (nanogpt, "train.bin", lambda _: b"", "train.bin has no tokens"),
        (llmc, "corpus_train_000000.bin", lambda old: old[:-2], "has 3022 bytes instead of 3024: it is cut off"),
        (megatron, "train_text_document.bin", lambda old: old[:-4], "has 3996 bytes instead of 4000: it is cut off"),
        (megatron, "train_text_document.idx", lambda old: old[:50], "has 50 bytes instead of 242 for 10 sequences"),
        (megatron, "train_text_document.idx", lambda old: b"x" + old[1:], "is no index of Megatron"),
        (megatron, "train_text_document.idx", lambda old: old[:17] + b"\x07" + old[18:], "type 7 of Megatron"),
    ],
)
def test_damaged(write: Any, file: str, change: Any, message: str, tmp_path: Path) -> None:
    for name in ("train", "val"):
        write(tmp_path, name, TOKENS)
    path = tmp_path / file
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=message):
        text.load(str(tmp_path), 10)


def test_unclear_folders(tmp_path: Path) -> None:
    nanogpt(tmp_path, "val", TOKENS)
    (tmp_path / "x.idx").write_bytes(b"of another program")
    with pytest.raises(UserError, match=r"no file has train in its name, only val\.bin"):
        text.load(str(tmp_path), 10)
    nanogpt(tmp_path, "more", TOKENS)
    with pytest.raises(UserError, match=r"more\.bin must have either train, val or test in its name"):
        text.load(str(tmp_path), 10)
    (tmp_path / "more.bin").unlink()
    llmc(tmp_path, "train", TOKENS)
    with pytest.raises(UserError, match=r"files of several layouts: llm\.c, nanoGPT"):
        text.load(str(tmp_path), 10)
    (tmp_path / "val.bin").unlink()
    with pytest.raises(UserError, match="has packed tokens, and no columns: drop --text-columns"):
        text.load(str(tmp_path), 10, columns="body")
    megatron(tmp_path, "val", TOKENS)
    (tmp_path / "val_text_document.bin").unlink()
    with pytest.raises(UserError, match=r"has val_text_document\.idx of Megatron, but no val_text_document\.bin"):
        text.load(str(tmp_path), 10)


def test_negative_token(tmp_path: Path) -> None:
    megatron(tmp_path, "train", np.where(np.arange(len(TOKENS)) == 7, -100, TOKENS))
    with pytest.raises(UserError, match="the largest token is 4294967196, perhaps a negative number"):
        text.load(str(tmp_path), 10)


def test_lone_token(tmp_path: Path) -> None:
    nanogpt(tmp_path, "train", TOKENS[:1])
    with pytest.raises(UserError, match="the training split has 1 tokens"):
        text.load(str(tmp_path), 10)


# --- a worker that is not forked gets its set pickled ---


def same_after_pickling(split: text.Text, most_bytes: int) -> None:
    """What comes out reads the same; what travels is the names of the files, and not their content."""
    pickled = pickle.dumps(split)
    assert len(pickled) < most_bytes, len(pickled)
    again = pickle.loads(pickled)
    assert again.digest() == split.digest()
    every = np.arange(len(split))
    for one, other in zip(again.read(every, every), split.read(every, every), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("write", LAYOUTS)
@pytest.mark.parametrize("files", [["train"], ["train_0", "train_1"]], ids=["one file", "two files"])
def test_files_are_opened_again(write: Any, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the last tenth of a file that is held out, which begins inside of it."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for i, name in enumerate(files):
        write(tmp_path, name, np.roll(np.tile(TOKENS, 20), i))
    for split in text.load(str(tmp_path), 10):
        same_after_pickling(split, 3000)


def test_packed_text_is_opened_again(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("".join(f"line {i} of a text\n" for i in range(5000)))
    for split in text.load(str(tmp_path), 16):
        same_after_pickling(split, 3000)
    assert len(pickle.dumps(np.memmap(tmp_path / "train.txt"))) > 50_000, "numpy pickles the content"


def test_parts_of_a_map(tmp_path: Path) -> None:
    """What lies in the file is opened again there; what was copied out of it is an ordinary array."""
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "numbers")
    whole = packed.Mapped(tmp_path / "numbers", np.uint16, "r", 20, (90,))
    parts = [
        whole,
        whole[7:60],
        whole[7:60][3:],
        whole[5:5],
        whole[::2],
        whole[2:6].view(np.uint8),
        whole.reshape(9, 10)[3],
    ]
    for part in parts:
        found = pickle.loads(pickle.dumps(part))
        assert np.array_equal(found, part)
        assert found.dtype == part.dtype
        assert isinstance(found, packed.Mapped) == (part.size > 0 and part.flags.c_contiguous)
    for copied in (whole[np.array([[3, 1], [4, 1]])], whole[whole > 50]):
        assert type(copied) is np.ndarray
    assert whole[3] == 13
