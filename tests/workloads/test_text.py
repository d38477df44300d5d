"""Windows that shift by one, a fixed validation split, and files that are packed once and never read half."""

import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import signal
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import UserError, seed
from common.workloads import documents, packed, splits, stdlib, text

from tests.harness import runner
from tests.harness.bigram import bigram_loss
from tests.harness.clock import Clock

FORKS = multiprocessing.get_context("forkserver")
LINES = [f"line {i}: {'ab ' * (i % 7)}é" for i in range(600)]


def windows(tokens: np.ndarray, seq_len: int, shift: int) -> list[tuple[list[int], list[int]]]:
    """The slow reference: inputs and targets of each sequence; the right shift is 1."""
    row = [int(token) for token in tokens]
    found = []
    while (start := len(found) * seq_len) + seq_len + 1 <= len(row):
        found.append((row[start : start + seq_len], row[start + shift : start + shift + seq_len]))
    return found


def read(split: text.Text, indices: np.ndarray) -> list[tuple[list[int], list[int]]]:
    inputs, targets = split.read(np.zeros_like(indices), indices)
    return list(zip(inputs.tolist(), targets.tolist(), strict=True))


def write_folder(folder: Path, lines: list[str] = LINES, kind: str = "txt") -> Path:
    """`lines` to train on, in two files, and their first 100 to validate."""
    import datasets

    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train-a", lines[:-50]), ("train-b", lines[-50:]), ("validation", lines[:100])):
        if kind == "txt":
            (folder / f"{name}.txt").write_text("".join(f"{line}\n" for line in part))
        else:
            rows = {"id": list(range(len(part))), "title": ["x"] * len(part), "body": part}
            datasets.Dataset.from_dict(rows).to_parquet(folder / f"{name}.parquet")
    return folder


def write_tokenizer(path: Path, size: int = 300) -> Path:
    """A BPE tokenizer with all bytes, that asks for truncation, padding and special tokens."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    model.train_from_iterator(LINES, trainer)
    model.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    model.enable_truncation(4)
    model.enable_padding(length=40)
    model.save(str(path))
    return path


# --- windows ---


@pytest.mark.parametrize(("num_tokens", "seq_len"), [(2, 1), (9, 4), (10, 4), (8, 4), (1000, 37), (65, 64)])
def test_read_is_the_slow_loop(num_tokens: int, seq_len: int) -> None:
    tokens = np.random.default_rng(num_tokens).permutation(num_tokens).astype(np.uint16)
    tokens[0] = 2**16 - 1  # stays positive
    split = text.Text(tokens, seq_len, 2**16, 1.0)
    wanted = windows(tokens, seq_len, shift=1)
    assert len(split) == len(wanted)
    found = read(split, np.arange(len(split)))
    assert found == wanted
    assert found != windows(tokens, seq_len, shift=0)  # mutant
    order = np.random.default_rng(0).integers(0, len(split), 20)
    assert read(split, order) == [wanted[i] for i in order]
    # Each token is an input once, from the first one on, and a target once.
    inputs, targets = split.read(np.zeros(len(split)), np.arange(len(split)))
    assert inputs.flatten().tolist() == tokens[: inputs.numel()].tolist()
    assert targets.flatten().tolist() == tokens[1 : inputs.numel() + 1].tolist()
    assert len(tokens) - 1 - inputs.numel() < seq_len  # no sequence is left out
    assert split.sample_units == {"tokens": seq_len} == {"tokens": inputs.shape[1]}, "of a sample, for tokens_per_s"


def test_what_is_read_is_its_own() -> None:
    split = text.Text(np.arange(9, dtype=np.uint16), 4, 9, 1.0)
    for count in (1, 2):
        before = split.digest()
        inputs, targets = split.read(np.zeros(count, np.int64), np.arange(count))
        assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)
        assert inputs.is_contiguous()
        assert targets.is_contiguous()
        targets.zero_()
        assert inputs.flatten().tolist() == list(range(4 * count))
        assert split.digest() == before
    inputs, targets = split.read(np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert inputs.shape == targets.shape == (0, 4)


def test_digest() -> None:
    split = text.Text(np.arange(9, dtype=np.uint16), 4, 9, 1.0)
    tokens = split.tokens.copy()
    tokens[5] ^= 1
    changes = [{"tokens": tokens}, {"tokens": tokens[:-1]}, {"seq_len": 3}, {"vocab_size": 10}, {"packed_digest": "a"}]
    changed = [dataclasses.replace(split, **change) for change in changes]
    assert len({one.digest() for one in [split, *changed]}) == 6
    assert dataclasses.replace(split, tokens=split.tokens.copy()).digest() == split.digest()


# --- the standard library ---


def test_stdlib_holds_out_whole_documents() -> None:
    train, validation = text.load("stdlib", 128)
    again = text.load("stdlib", 128)
    assert [split.digest() for split in again] == [train.digest(), validation.digest()]
    assert (train.vocab_size, train.tokens_per_byte) == (256, 1.0)
    assert len(train.tokens) > 4e6
    assert 32 * 1024 < len(validation.tokens) < 128 * 1024
    documents = stdlib.read_documents()
    assert list(documents) == sorted(documents)
    assert not any("site-packages" in name or "/test/" in name or "/tests/" in name for name in documents)
    whole = bytes(train.tokens.astype(np.uint8))
    kept = {name for name, content in documents.items() if content in whole}
    held_out = [content for name, content in documents.items() if name not in kept]
    assert 0.05 < len(held_out) / len(documents) < 0.15
    assert "pydoc_data/topics.py" in kept
    excerpts = bytes(validation.tokens.astype(np.uint8))
    for content in held_out:
        middle = max(0, len(content) - stdlib.EXCERPT) // 2
        excerpt = content[middle : middle + stdlib.EXCERPT]
        assert excerpt in excerpts
        assert excerpt not in whole
    assert len(excerpts) == sum(min(len(content), stdlib.EXCERPT) for content in held_out) + len(held_out) - 1


def test_stdlib_holds_out_by_name_alone() -> None:
    """Another choice would let runs that resume validate on what they have trained on."""
    names = ["abc.py", "bz2.py", "copy.py", "enum.py", "json/__init__.py", "shutil.py", "typing.py"]
    draws = [seed.uniform(seed.HOLD_OUT, zlib.crc32(name.encode())) < splits.HOLD_OUT for name in names]
    assert draws == [False, True, True, False, True, True, False]
    validation = bytes(text.load("stdlib", 128)[1].tokens.astype(np.uint8))
    for name, held_out in zip(names, draws, strict=True):
        content = stdlib.read_documents()[name]
        assert (content[len(content) // 2 - 500 : len(content) // 2 + 500] in validation) == held_out


# --- folders ---


@pytest.mark.parametrize("kind", ["txt", "parquet"])
def test_folder_as_bytes(kind: str, tmp_path: Path) -> None:
    """The rows joined as a text file has them; in a parquet file, of the longest column of strings."""
    train, validation = text.load(str(write_folder(tmp_path, kind=kind)), 64)
    for split, lines in ((train, LINES), (validation, LINES[:100])):
        assert isinstance(split.tokens, np.memmap)
        assert not split.tokens.flags.writeable
        assert bytes(split.tokens.astype(np.uint8)).decode() == "".join(f"{line}\n" for line in lines)
        assert (split.vocab_size, split.tokens_per_byte) == (256, 1.0)
        assert read(split, np.arange(len(split))) == windows(split.tokens, 64, shift=1)
    assert train.digest() != validation.digest()


@pytest.mark.parametrize("kind", ["Dataset", "DatasetDict"])
def test_saved_to_disk(kind: str, tmp_path: Path) -> None:
    import datasets

    rows = datasets.load_dataset(str(write_folder(tmp_path / "txt")))
    (rows["train"] if kind == "Dataset" else rows).save_to_disk(tmp_path / "saved")
    found, wanted = (text.load(str(tmp_path / name), 32) for name in ("saved", "txt"))
    if kind == "Dataset":
        assert sum(len(split.tokens) for split in found) == len(wanted[0].tokens), "a tenth is held out"
    else:
        assert [split.digest() for split in found] == [split.digest() for split in wanted]


def test_same_text_has_the_same_digest_wherever_it_lies(tmp_path: Path) -> None:
    one, other = (text.load(str(write_folder(tmp_path / kind, kind=kind)), 64) for kind in ("txt", "parquet"))
    assert one[0].digest() == other[0].digest()
    assert one[0].tokens.filename != other[0].tokens.filename


def test_changed_folder_is_packed_anew(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    before, _ = text.load(str(folder), 64)
    write_folder(folder, [line.upper() for line in LINES])
    os.utime(folder / "train-a.txt", (1, 1))  # should the clock be too coarse to tell
    after, _ = text.load(str(folder), 64)
    assert before.digest() != after.digest()
    assert bytes(after.tokens[:6].astype(np.uint8)) == b"LINE 0"


def test_holds_out_the_same_rows_every_time(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "validation.txt").unlink()
    train, validation = text.load(str(folder), 16)
    kept, held_out = (bytes(split.tokens.astype(np.uint8)).decode().splitlines() for split in (train, validation))
    assert len(held_out) == 60
    assert not set(kept) & set(held_out)
    assert sorted(kept + held_out) == sorted(LINES)
    assert [split.tokens.filename for split in text.load(str(folder), 16)] == [
        train.tokens.filename,
        validation.tokens.filename,
    ]


def test_tokenizer_round_trip(tmp_path: Path) -> None:
    """Every row is whole and bare: no truncation, padding or special tokens, whatever the file asks for."""
    import tokenizers

    path = write_tokenizer(tmp_path / "tokenizer.json")
    folder = write_folder(tmp_path / "data")
    train, validation = text.load(str(folder), 16, str(path))
    model = tokenizers.Tokenizer.from_file(str(path))
    for split, lines in ((train, LINES), (validation, LINES[:100])):
        whole = "".join(f"{line}\n" for line in lines)
        assert model.decode(split.tokens.tolist()) == whole
        assert split.tokens.min() > 0
        assert split.tokens.max() < split.vocab_size == 300
        assert split.tokens_per_byte == len(split.tokens) / len(whole.encode())
        assert split.tokens_per_byte < 0.8
    assert train.tokens_per_byte != validation.tokens_per_byte
    assert text.load(str(folder), 16)[0].tokens_per_byte == 1.0  # another file
    other = write_tokenizer(tmp_path / "other.json", size=290)
    assert text.load(str(folder), 16, str(other))[0].vocab_size == 290


# --- several processes ---


def prepare(folder: Path, log: Path, pause_s: float, num_parts: int, together: int = 1) -> None:
    """Load in a process of its own, slowly; say who packs, batch by batch, and what was loaded.

    A batch takes so long; one of the training split also until as many processes have begun one as pack `together`.
    """
    import datasets

    datasets.config.HF_DATASETS_CACHE = folder.parent / "cache"  # as `own_cache`
    encode = documents.Encoder.encode

    def slow(*args: Any) -> tuple[np.ndarray, int]:
        with log.open("a") as file:
            file.write(f"packs {os.getpid()}\n")
        time.sleep(pause_s)
        if together > 1:
            runner.wait_for(lambda: len({line for line in log.read_text().splitlines() if "packs" in line}) >= together)
        return encode(*args)

    documents.Encoder.encode = slow  # type: ignore[method-assign]
    packed.PARTS = num_parts
    packed.BATCH_ROWS = 100
    train, validation = text.load(str(folder), 64)
    found = [train.digest(), validation.digest()]
    with log.open("a") as file:
        file.write(f"loaded {json.dumps(found)}\n")


def start(*args: object) -> BaseProcess:
    process = FORKS.Process(target=prepare, args=args)
    process.start()
    return process


def wait_for(log: Path, word: str) -> None:
    runner.wait_for(lambda: log.exists() and word in log.read_text())


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests pack meanwhile."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def token_files() -> set[Path]:
    import datasets

    return set((datasets.config.HF_DATASETS_CACHE / "packed").glob("*"))


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("num_parts", [6, 1])
def test_processes_pack_together_and_agree(num_parts: int, tmp_path: Path) -> None:
    """Each row once; a set of one part by one of them."""
    folder, log = write_folder(tmp_path / "data"), tmp_path / "log"
    processes = [start(folder, log, 0.1, num_parts, 2 if num_parts == 6 else 1) for _ in range(2)]
    for process in processes:
        process.join(runner.HANG_S)
    assert [process.exitcode for process in processes] == [0, 0]
    lines = log.read_text().splitlines()
    packs = [line for line in lines if line.startswith("packs")]
    assert len(packs) == 7, "batches: 6 of the training split, 1 of the other"
    assert len(set(packs)) == 2 if num_parts == 6 else len(set(packs)) <= 2
    loaded = [line for line in lines if line.startswith("loaded")]
    assert len(loaded) == 2
    assert len(set(loaded)) == 1
    assert sorted(path.suffix for path in token_files()) == [".tokens", ".tokens"]
    alone = [split.digest() for split in text.load(str(write_folder(tmp_path / "again")), 64)]
    assert loaded[0] == f"loaded {json.dumps(alone)}"


@pytest.mark.usefixtures("own_cache")
def test_killed_while_it_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leaves is not read, and its lock not waited for."""
    folder, log = write_folder(tmp_path / "data"), tmp_path / "log"
    process = start(folder, log, 1.0, 6)
    wait_for(log, "packs")
    log.unlink()
    wait_for(log, "packs")  # the second batch: the first one is written
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(runner.HANG_S)
    (parts,) = token_files()
    assert sorted(path.suffix for path in parts.iterdir()) == [".lock", ".lock", ".part", ".partial"]
    monkeypatch.setattr(packed, "PARTS", 6)
    monkeypatch.setattr(packed, "BATCH_ROWS", 100)
    train, validation = text.load(str(folder), 64)
    assert bytes(train.tokens.astype(np.uint8)).decode() == "".join(f"{line}\n" for line in LINES)
    assert len(validation.tokens) == len("".join(f"{line}\n" for line in LINES[:100]).encode())
    assert sorted(path.suffix for path in token_files()) == [".tokens", ".tokens"]


@pytest.mark.usefixtures("own_cache")
def test_nobody_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only while something of the set grows, in whatever part."""
    monkeypatch.setattr(packed, "WAIT_S", 0.5)
    monkeypatch.setattr(packed, "_write_part", lambda *_: pytest.fail("it is written in spite of the lock"))
    clock = Clock(now=0.0)
    monkeypatch.setattr(packed, "time", clock)
    folder = write_folder(tmp_path / "data")

    @contextlib.contextmanager
    def held(path: Path) -> Iterator[bool]:
        if clock.now < 1.0:
            (path.parent / "0.other.1.partial").write_bytes(bytes(int(1000 * clock.now)))
        yield False

    monkeypatch.setattr(packed, "_locked", held)
    with pytest.raises(UserError, match=r"--data: another process has a lock in .*\.parts and has tokenized nothing"):
        text.load(str(folder), 64)
    assert clock.now == pytest.approx(1.5, abs=2 * packed.POLL_S), "half a second after it has grown"
    assert {path.suffix for path in token_files()} == {".parts"}


@pytest.mark.usefixtures("own_cache")
def test_folder_of_parts_that_goes_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mkdir finds it there, and asks whether it is a folder when the other process has joined all parts."""
    folder = write_folder(tmp_path / "data")
    made = Path.mkdir

    def mkdir(path: Path, *args: Any, **how: Any) -> None:
        if path.suffix == ".parts":
            monkeypatch.setattr(Path, "mkdir", made)
            others.append(text.load(str(folder), 64))
            raise FileExistsError(path)
        made(path, *args, **how)

    others: list[Any] = []
    monkeypatch.setattr(Path, "mkdir", mkdir)
    train, _ = text.load(str(folder), 64)
    assert len(others) == 1
    assert (train.tokens == others[0][0].tokens).all()


class Waiting(Clock):
    """Does not pass for who waits for another thread."""

    def sleep(self, seconds: float) -> None:
        if seconds == packed.POLL_S:
            time.sleep(0.01)
        else:
            super().sleep(seconds)


def test_joining_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large set, it takes longer than anybody waits for a process that does nothing."""
    import datasets

    blocks, clock = packed._blocks, Waiting()

    def slow(paths: Sequence[Path]) -> Iterator[bytes]:
        for block in blocks(paths):
            clock.sleep(0.3)
            looks = clock.looks
            for _ in range(200):  # until the other thread has looked, unless it comes later
                time.sleep(0.01 * (clock.looks == looks))
            yield block

    monkeypatch.setattr(packed, "time", clock)
    for name, value in (("BLOCK_BYTES", 2**16), ("WAIT_S", 0.8), ("BATCH_ROWS", 50), ("_blocks", slow)):
        monkeypatch.setattr(packed, name, value)
    lines = [f"{i:04d}".ljust(2**10, "x") for i in range(400)]  # 7 blocks
    rows = datasets.Dataset.from_dict({"text": lines})
    encoder = documents.Encoder("lines", rows, None, "")
    with ThreadPoolExecutor() as pool:
        paths = {future.result(runner.HANG_S) for future in [pool.submit(packed.pack, rows, encoder) for _ in range(2)]}
    (path,) = paths
    tokens = packed.Packed(path, sum(len(line) + 1 for line in lines), np.uint8).tokens
    assert bytes(tokens).decode() == "".join(f"{line}\n" for line in lines)


# --- token files that have changed ---


def token_file(split: text.Text) -> Path:
    return Path(split.tokens.filename)  # type: ignore[attr-defined]


def spoil(path: Path, offset: int, content: bytes) -> None:
    """Write into a file, as a program that errs would; its time of change is put back."""
    before = path.stat()
    with path.open("rb+") as file:
        file.seek(offset)
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("how", ["spoilt", "cut", "empty", "a checksum"])
def test_changed_token_file_is_made_again(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path)
    before, _ = text.load(str(folder), 64)
    wanted, digest = before.tokens.tolist(), before.digest()
    path = token_file(before)
    if how == "spoilt":
        spoil(path, 1000, os.urandom(40))
    elif how == "a checksum":
        spoil(path, path.stat().st_size - 2, b"??")
    else:
        os.truncate(path, 1001 if how == "cut" else 0)
    capsys.readouterr()
    after, _ = text.load(str(folder), 64)
    assert after.tokens.tolist() == wanted
    assert after.digest() == digest
    told = capsys.readouterr().err
    assert f"note: {path} has changed since it was written" in told
    assert told.count("note: ") == 1
    text.load(str(folder), 64)
    assert not capsys.readouterr().err


def test_mutant_that_trusts_its_token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same digest, other tokens."""
    folder = write_folder(tmp_path)
    before, _ = text.load(str(folder), 64)
    wanted = before.tokens.tolist()
    spoil(token_file(before), 1000, b"\xff" * 40)
    monkeypatch.setattr(packed.Packed, "check", lambda *_: None)
    after, _ = text.load(str(folder), 64)
    assert after.digest() == before.digest()
    assert after.tokens.tolist() != wanted


def test_large_token_file_is_checked_where_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that nobody reads are not compared; the one that has changed is named when its turn comes."""
    monkeypatch.setattr(packed, "CHECKED_AT_ONCE", 0)
    monkeypatch.setattr(packed, "BLOCK_BYTES", 128)  # of 128 bytes: two sequences
    folder = write_folder(tmp_path)
    split, _ = text.load(str(folder), 64)
    path = token_file(split)
    wanted = read(split, np.array([0, 1]))
    spoil(path, 5 * 128 + 7, b"\xff\xff")
    split, _ = text.load(str(folder), 64)
    assert read(split, np.array([0, 1])) == wanted
    split.read(np.zeros(2), np.array([6, 8]))  # tokens 384 to 448 and 512 to 576
    for sequence in (9, 10, 11):  # the first one's last target is in the block
        again, _ = text.load(str(folder), 64)
        assert again.file is not None
        content = path.read_bytes()
        with pytest.raises(
            UserError, match=r"has changed since it was written \(block 5 has .* the same command packs"
        ):
            again.read(np.zeros(1), np.array([sequence]))
        assert not path.exists()
        path.write_bytes(content)


@pytest.mark.parametrize("seq_len", [1, 64, 130, 1000])
def test_every_block_that_is_read_is_checked(seq_len: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a slow loop over the tokens of each sequence."""
    monkeypatch.setattr(packed, "CHECKED_AT_ONCE", 0)
    monkeypatch.setattr(packed, "BLOCK_BYTES", 128)
    split, _ = text.load(str(write_folder(tmp_path)), seq_len)
    assert split.file is not None
    for indices in ([0], [len(split) - 1], [0, 2, 1], [len(split) // 2, 0]):
        split.file._checked[:] = False
        split.read(np.zeros(len(indices)), np.array(indices))
        tokens = {token for index in indices for token in range(index * seq_len, (index + 1) * seq_len + 1)}
        assert {*np.flatnonzero(split.file._checked)} == {2 * token // 256 for token in tokens}


def test_token_beyond_the_vocabulary_is_named() -> None:
    split = text.Text(np.array([1, 2, 300, 4, 5], np.uint16), 4, 256, 1.0)
    with pytest.raises(
        UserError, match="a token of --data is 300, and the vocabulary has only 256 tokens: give the --tokenizer"
    ):
        split.read(np.zeros(1), np.array([0]))


# --- refusals ---


def test_text_of_one_line_is_cut(tmp_path: Path) -> None:
    """As text8 is: nine tenths to train on, the last tenth to validate."""
    content = "".join(f"word{i} é " for i in range(2000))
    (tmp_path / "train.txt").write_text(content)
    train, validation = text.load(str(tmp_path), 16)
    first, last = (bytes(split.tokens.astype(np.uint8)).decode().removesuffix("\n") for split in (train, validation))
    assert first + last == content
    assert len(last) == pytest.approx(len(content) / 10, abs=1)
    again = text.load(str(tmp_path), 16)
    assert [token_file(split) for split in again] == [token_file(train), token_file(validation)]


UNREADABLE = {
    "latin-1": ("é".encode("latin-1") * 100, r"train\.txt is not UTF-8: .* at byte 0; convert it"),
    "utf-16": ("text\n".encode("utf-16") * 100, r"train\.txt is not UTF-8: .* at byte 0; convert it"),
    "empty": (b"", r"train\.txt is empty"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_cause_and_file_are_named(kind: str, tmp_path: Path) -> None:
    content, told = UNREADABLE[kind]
    (tmp_path / "train.txt").write_bytes(content)
    with pytest.raises(UserError, match=rf"--data {tmp_path}: this folder cannot be read \({tmp_path}/{told}"):
        text.load(str(tmp_path), 16)


def test_cause_of_a_broken_table(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n{"text": ')
    with pytest.raises(UserError, match=rf"this folder cannot be read \(\w+: .*, in {tmp_path}/train\.jsonl\)$"):
        text.load(str(tmp_path), 16)


def test_nul_is_text(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(b"a\0b\n" * 100)
    assert text.load(str(tmp_path), 16)[0].tokens[:4].tolist() == [97, 0, 98, 10]


def test_refusals(tmp_path: Path) -> None:
    import datasets

    folder = str(write_folder(tmp_path / "data", LINES[:120]))
    size = len("".join(f"{line}\n" for line in LINES[:100]).encode())
    with pytest.raises(
        UserError, match=r"--tokenizer t\.json cannot be used with --data stdlib, which is read as bytes"
    ):
        text.load("stdlib", 8, "t.json")
    with pytest.raises(
        UserError,
        match=f"--data {folder}: the validation split has {size} tokens, and --seq-len {size} needs at least",
    ):
        text.load(folder, size)
    assert len(text.load(folder, size - 1)[1]) == 1
    with pytest.raises(
        UserError,
        match=r"--data stdlib: the training split has \d+ tokens, and --seq-len 90000000 needs at least 90000001",
    ):
        text.load("stdlib", 90_000_000)
    with pytest.raises(UserError, match="there is no such folder"):
        text.load(str(tmp_path / "missing"), 8)
    (tmp_path / "labels").mkdir()
    for split in ("train", "validation"):
        features = datasets.Features({"y": datasets.ClassLabel(names=["a"]), "n": datasets.Value("int64")})
        rows = datasets.Dataset.from_dict({"y": [0], "n": [1]}, features=features)
        rows.to_parquet(tmp_path / "labels" / f"{split}.parquet")
    with pytest.raises(UserError, match=r"has no column of strings: \{'y': 'int64', 'n': 'int64'\}"):
        text.load(str(tmp_path / "labels"), 8)


def test_columns_that_datasets_adds_are_no_text(tmp_path: Path) -> None:
    """A WebDataset has the path of its file in each row, which is often longer than the text; it may be all strings."""
    rows = [{"__url__": "/a/long/path/to/train-000.tar", "note": "a b", "n": 1}] * 99
    for name, keys in (("both", ("__url__", "note", "n")), ("none", ("__url__", "n"))):
        (tmp_path / name).mkdir()
        lines = [json.dumps({key: row[key] for key in keys}) + "\n" for row in rows]
        (tmp_path / name / "train.jsonl").write_text("".join(lines))
    train, _ = text.load(str(tmp_path / "both"), 8)
    assert bytes(np.asarray(train.tokens[np.arange(3)], np.uint8)) == b"a b"
    with pytest.raises(UserError, match=r"has no column of strings: \{'n': 'int64'\}"):
        text.load(str(tmp_path / "none"), 8)


def test_no_text_at_all(tmp_path: Path) -> None:
    """Missing texts are no rows."""
    import datasets

    for name, texts in (("train", ["a", None, "b"] * 9), ("validation", [None])):
        features = datasets.Features({"text": datasets.Value("string")})
        datasets.Dataset.from_dict({"text": texts}, features=features).to_parquet(tmp_path / f"{name}.parquet")
    with pytest.raises(UserError, match="the validation split has 0 tokens, and --seq-len 8 needs at least 9"):
        text.load(str(tmp_path), 8)


def test_refused_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    for path, why in ((broken, "ValueError: .*Model missing"), (tmp_path / "missing.json", "FileNotFoundError: ")):
        with pytest.raises(UserError, match=rf"--tokenizer {path} cannot be read \({why}"):
            text.load(str(tmp_path), 8, str(path))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"\(ModuleNotFoundError: .* needs pip install tokenizers"):
        text.load(str(tmp_path), 8, str(broken))


@pytest.mark.parametrize("largest", [2**16 - 1, 2**16, 2**17])
def test_tokens_of_large_vocabularies(largest: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As those of Llama 3, Qwen and Gemma: in 32 bits, where 16 are not enough."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"low": 0, "top": largest}, unk_token="low"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.txt").write_text("low top top low\n" * 10_000)
    for _ in range(2):  # packed, and read again
        train, validation = text.load(str(tmp_path / "data"), 4, str(tmp_path / "tokenizer.json"))
        assert train.tokens.dtype == (np.uint16 if largest < 2**16 else np.uint32)
        assert train.vocab_size == largest + 1
        inputs, targets = train.read(np.zeros(1, int), np.array([len(train) - 1]))
        assert inputs.tolist() == [[0, largest, largest, 0]]
        assert targets.tolist() == [[largest, largest, 0, 0]]
        assert len(train.tokens) + len(validation.tokens) == 40_000
    assert (
        f"vocabulary {largest + 1:,}; column 'text'; rows are lines, without an end; no validation split"
        in capsys.readouterr().out
    )


def test_configurations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A set of several, as wikitext and c4 are: one is named after a colon."""
    for name in ("first", "second"):
        (tmp_path / f"{name}.txt").write_text(f"{name} text\n" * 40)
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.txt\n" for name in ("first", "second"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    train, _ = text.load(f"{tmp_path}:second", 8)
    assert bytes(train.tokens[:6].astype(np.uint8)) == b"second"
    assert "training and" in capsys.readouterr().out
    for where in (str(tmp_path), f"{tmp_path}:third"):
        with pytest.raises(UserError, match=r"first.*second.*write --data NAME:CONFIG"):
            text.load(where, 8)


# --- tests/harness/bigram.py ---


def test_bigram_loss_is_the_slow_loop() -> None:
    generator = np.random.default_rng(0)
    train, validation = (text.Text(generator.integers(0, 7, n).astype(np.uint16), 5, 7, 1.0) for n in (200, 48))
    total, count = 0.0, 0
    for inputs, targets in read(validation, np.arange(len(validation))):
        for before, after in zip(inputs, targets, strict=True):
            pairs = list(zip(train.tokens[:-1], train.tokens[1:], strict=True))
            seen = sum(pair == (before, after) for pair in pairs)
            total -= math.log((seen + 0.1) / (sum(pair[0] == before for pair in pairs) + 0.1 * 7))
            count += 1
    assert bigram_loss(train, validation) == pytest.approx(total / count, rel=1e-12)
