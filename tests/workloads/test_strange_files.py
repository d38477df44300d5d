"""Files of others run nothing, hang nothing and print nothing raw: each kind of file, each way to be odd."""

import contextlib
import io
import json
import os
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import UserError, manifest
from common.state import start
from common.workloads import (
    documents,
    gpt,
    gpt_names,
    image_decode,
    image_folder,
    images,
    parsing,
    pretrained,
    splits,
    text,
    token_files,
)
from PIL import Image

from tests.conftest import write_image_folder
from tests.harness import runner

LINES = "".join(f"the quick brown fox jumps over the lazy dog {i}\n" for i in range(60))
TOKENS = (np.arange(4000) % 199).astype(np.uint16).tobytes()
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


# --- run nothing ---


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The mark that a `gs` in the PATH leaves."""
    mark = tmp_path / "mark"
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n: > {mark}\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # looked for once in a process
    return mark


def eps_in_a_folder(folder: Path) -> None:
    write_image_folder(folder, 20, 10)
    next(folder.glob("train/*/*.png")).write_bytes(EPS)
    images.load(str(folder), 0, flip=False)


def eps_beside_a_text(folder: Path) -> None:
    import datasets

    folder.mkdir()
    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image(decode=False)})
    row = {"text": [LINES], "image": [{"bytes": EPS, "path": "x.png"}]}
    kept = datasets.Dataset.from_dict(row, features=features).cast_column("image", datasets.Image())
    kept.to_parquet(folder / "train.parquet")
    text.load(str(folder), 8)


def test_no_image_starts_a_program(ghostscript: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"is not a readable image: it is none of BMP, GIF, JPEG, "):
        eps_in_a_folder(tmp_path / "data")
    eps_beside_a_text(tmp_path / "text")
    assert not ghostscript.exists()
    monkeypatch.setattr(image_decode, "FORMATS", None)  # the mutant: whatever Pillow knows
    with pytest.raises(UserError):
        eps_in_a_folder(tmp_path / "again")
    assert ghostscript.exists(), "the proof sees what it looks for"


def test_each_format_that_is_listed_is_read(tmp_path: Path) -> None:
    assert {suffix.lstrip(".").upper().replace("JPG", "JPEG") for suffix in image_folder.SUFFIXES} - {"TIF"} <= {
        *image_decode.FORMATS
    }
    for name in image_decode.FORMATS:
        content = io.BytesIO()
        Image.new("RGB", (9, 9), (200, 10, 10)).save(content, name)
        with Image.open(io.BytesIO(content.getvalue()), formats=image_decode.FORMATS) as file:
            file.load()


# --- hang nothing ---


def bins(folder: Path) -> Path:
    (folder / "train.bin").write_bytes(TOKENS)
    return folder / "train.bin"


def index(folder: Path, sizes: tuple[int, ...] = (4000,), starts: tuple[int, ...] = (0, 0)) -> Path:
    bins(folder)
    head = struct.pack("<9sQBQQ", token_files.MEGATRON_MAGIC, 1, 8, len(sizes), 1)
    positions = np.array(starts[: len(sizes)], np.int64).tobytes()
    (folder / "train.idx").write_bytes(head + np.array(sizes, np.int32).tobytes() + positions + bytes(8))
    return folder / "train.idx"


def lines(folder: Path) -> Path:
    (folder / "train.txt").write_text(LINES)
    return folder / "train.txt"


def table(folder: Path) -> Path:
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES.splitlines()))
    (folder / "notes.txt").write_text("also here")
    return folder / "train.jsonl"


def saved_weights(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        torch.save(torch.nn.Linear(2, 2).state_dict(), folder / name)
        return folder / name

    return write


def read_tokenizer(folder: Path) -> None:
    documents.load_tokenizer(str(folder / "tokenizer.json"))


def tokenizer(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        vocab = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, "version": "1.0"}
        (folder / "tokenizer.json").write_text(json.dumps(vocab))
        for other in ("tokenizer_config.json", "chat_template.jinja"):
            (folder / other).write_text("{}")
        return folder / name

    return write


def read_text(folder: Path) -> None:
    text.load(str(folder), 8)


def begin(name: str) -> Callable[[Path], None]:
    return lambda folder: start.begin_with(str(folder / name), torch.nn.Linear(2, 2))


FILES: dict[str, tuple[Callable[[Path], Path], Callable[[Path], None]]] = {
    "tokens": (bins, read_text),
    "index": (index, read_text),
    "text": (lines, read_text),
    "table": (table, read_text),
    "tokenizer": (tokenizer("tokenizer.json"), read_tokenizer),
    "tokenizer's configuration": (tokenizer("tokenizer_config.json"), read_tokenizer),
    "template": (tokenizer("chat_template.jinja"), read_tokenizer),
    "pth": (saved_weights("w.pth"), begin("w.pth")),
    "safetensors": (saved_weights("w.safetensors"), begin("w.safetensors")),
    "folder of weights": (saved_weights("w.safetensors"), begin("")),
}
ODD: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
    "loop": lambda path: path.symlink_to(path.name),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("kind", FILES)
def test_what_is_no_file_is_refused(kind: str, odd: str, tmp_path: Path) -> None:
    """Before it is opened: a pipe would be opened for ever, a device read for ever. The page says of which file."""
    write, read = FILES[kind]
    folder = tmp_path / "data"
    folder.mkdir()
    path = write(folder)
    path.unlink()
    ODD[odd](path)
    if (kind, odd) in {("text", "folder"), ("table", "folder"), ("template", "loop")}:
        return  # a folder of a folder of texts, which datasets reads; a link that is not there
    if kind == "tokenizer's configuration" and odd == "loop":
        return
    with pytest.raises(UserError) as refusal:
        read(folder)
    assert path.name in str(refusal.value) or "train" in str(refusal.value)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kind", FILES)
def test_a_start_knows_at_what_it_looks(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first call that a disk has to answer: one that does not answer can be named."""
    write, read = FILES[kind]
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder)
    calls: list[tuple[str, bool]] = []

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if args and str(args[0]).startswith(str(folder)):
                calls.append((f"{real} of {args[0]}", str(manifest.Looked.at).startswith(str(folder))))
            return real(*args, **more)

        return call

    for module, name in ((os, "stat"), (os, "scandir"), (os, "listdir"), (io, "open")):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    monkeypatch.setattr(manifest.Looked, "at", None)
    with contextlib.suppress(UserError):  # these weights are none
        read(folder)
    assert calls
    assert not [call for call, known in calls if not known]
    monkeypatch.setattr(manifest.Looked, "at", None)
    monkeypatch.setattr(manifest, "looks_at", lambda _: None)  # the mutant
    with contextlib.suppress(UserError):
        read(folder)
    assert [call for call, known in calls if not known]


@pytest.mark.parametrize("content", ["", "7", "-5", "1000000000000", "\udcff", "9" * 5000, "200 wrong"])
def test_a_kept_vocabulary_that_is_not_right_is_made_again(content: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    bins(tmp_path / "data")
    assert text.load(str(tmp_path / "data"), 8)[0].vocab_size == 199
    (kept,) = (tmp_path / "cache" / "packed").glob("*.vocabulary")
    kept.write_bytes(content.encode("utf-8", "surrogateescape"))
    assert text.load(str(tmp_path / "data"), 8)[0].vocab_size == 199


@pytest.mark.parametrize("damage", ["cut", "changed", "empty list", "pipe"])
def test_a_kept_list_of_images_that_is_not_right_is_made_again(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_folder, "SETTLED_S", -1.0)
    root = write_image_folder(tmp_path / "data", 20, 10)
    wanted = listed(root)
    (kept,) = (tmp_path / "cache" / "listed").glob("*/*.train.arrow")
    done = next(kept.parent.glob("*.done"))
    content = bytearray(kept.read_bytes())
    if damage == "cut":
        kept.write_bytes(content[:-9])
    elif damage == "changed":
        content[len(content) // 2] ^= 1
        kept.write_bytes(content)
    elif damage == "empty list":
        done.write_text("")
    else:
        done.unlink()
        os.mkfifo(done)
    assert listed(root) == wanted


def listed(root: Path) -> list[str]:
    """The paths of the training images."""
    import datasets

    found = image_folder.load(root)
    assert found is not None
    return [row["path"] for row in found["train"].cast_column("image", datasets.Image(decode=False))["image"]]


# --- lies ---


def test_sizes_that_a_token_file_cannot_have(tmp_path: Path) -> None:
    index(tmp_path, (-1, 4001))
    with pytest.raises(UserError, match=r"train\.idx has a sequence of -1 tokens"):
        read_text(tmp_path)
    for starts in ((0, 0), (2, 4000), (0, 4002), (4000, 0)):
        index(tmp_path, (2000, 2000), starts)
        with pytest.raises(UserError, match=r"train\.idx has sequences that do not lie one after the other"):
            read_text(tmp_path)
    index(tmp_path, (2000, 2000), (0, 4000))
    read_text(tmp_path)
    (tmp_path / "train.idx").unlink()
    (tmp_path / "train.bin").write_bytes(np.array([20240520, 1, -506], np.int32).tobytes())
    with pytest.raises(UserError, match=r"train\.bin has -506 tokens, as its header says"):
        read_text(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_attention_heads", 0), ("num_hidden_layers", float("inf")), ("hidden_size", "64"), ("rope_theta", "y")],
)
def test_sizes_that_a_model_cannot_have(key: str, value: object, tmp_path: Path) -> None:
    config = gpt_names.to_config(gpt.Shape(32, 1, 2, 8)) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"config.json has {key} .*, which a model cannot have"):
        pretrained.names_in("x", tmp_path, gpt.GPT(gpt.Shape(32, 1, 2, 8)))


@pytest.mark.usefixtures("group")
def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(2, 2, dtype=torch.int32), "bias": torch.ones(2)}, tmp_path / "w.safetensors")
    model = torch.nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(
        UserError, match=r"has torch\.int32 in weight: it is of a quantised model, whose numbers are no w"
    ):
        start.begin_with(str(tmp_path / "w.safetensors"), model)
    assert torch.equal(model.weight, before)


# --- parsers and cards ---


def test_a_parser_that_crashes_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n")
    with pytest.raises(UserError, match=r"parses its files has crashed with SIGSEGV: one is damaged, or made for that"):
        read_text(tmp_path)


def chosen_text(folder: Path) -> None:
    text.load(str(folder), 8)


def named_text(folder: Path) -> None:
    text.load(str(folder), 8, columns="text")


def names_of_images(folder: Path) -> None:
    rows, _ = splits.load(str(folder))
    image_folder.with_images(rows, folder)


@pytest.mark.parametrize("read", [chosen_text, named_text, names_of_images])
def test_a_text_that_is_not_utf8_is_a_sentence(read: Callable[[Path], None], tmp_path: Path) -> None:
    """A parser of parquet files does not look at strings: whoever reads the cells first does."""
    import pyarrow as pa
    from pyarrow import parquet

    ends = pa.array(range(0, 4 * 41, 4), pa.int32()).buffers()[1]
    odd = pa.Array.from_buffers(pa.string(), 40, [None, ends, pa.py_buffer(b"a\xff\xfeb" * 40)])
    folder = tmp_path / "data"
    folder.mkdir()
    parquet.write_table(pa.table({"text": odd}), folder / "train.parquet")
    with pytest.raises(
        UserError, match=r"a text of the column 'text' is not UTF-8 \(invalid start byte at its byte 1\)"
    ):
        read(folder)


class Busy:
    """A builder whose files take for ever; it says in which process."""

    def __init__(self, mark: Path, work: Callable[[], object]) -> None:
        self.mark = mark
        self.work = work

    def download_and_prepare(self) -> None:
        self.mark.with_suffix(".part").write_text(str(os.getpid()))
        self.mark.with_suffix(".part").rename(self.mark)
        while True:
            self.work()


def test_a_parser_that_never_ends_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the processor time that its bytes need, many times over; time in which it waits does not count."""
    folder = tmp_path / "data"
    folder.mkdir()
    lines(folder)
    size = (folder / "train.txt").stat().st_size
    monkeypatch.setattr(parsing, "SLOWEST", 1)
    assert parsing.limit_s(folder) == parsing.LEAST_S + size
    monkeypatch.setattr(parsing, "LEAST_S", 1 - size)
    reason = parsing.prepare(Busy(tmp_path / "mark", lambda: None), folder, str)
    assert reason == "the program that parses its files had not ended after 1 s: one is made for that"


def test_a_parser_ends_with_its_rank(tmp_path: Path) -> None:
    """Also where the rank is killed: nobody would wait for what it parses."""
    rank = os.fork()
    if not rank:
        parsing.prepare(Busy(tmp_path / "mark", lambda: time.sleep(1)), None, str)
        os._exit(0)
    parser = int(runner.wait_for(lambda: (tmp_path / "mark").exists() and (tmp_path / "mark").read_text()))
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    runner.wait_for(lambda: not is_there(parser), f"process {parser} is still there")


def is_there(number: int) -> bool:
    """Whether a process is there, and has not ended."""
    stat = Path(f"/proc/{number}/stat")
    return stat.exists() and stat.read_text().rpartition(") ")[2][0] not in "ZX"


LISTS: dict[str, tuple[dict[str, object], str]] = {
    "state.json": ({"_data_files": [{"filename": "../../secret.arrow"}]}, r"\.\./\.\./secret\.arrow"),
    "train/state.json": ({"_data_files": [{"filename": "/dev/stdin"}]}, "/dev/stdin"),
    "validation/state.json": ({"_data_files": [{"filename": "http://127.0.0.1:9/x"}]}, "http://127"),
    "dataset_dict.json": ({"splits": ["train", "../elsewhere"]}, r"\.\./elsewhere"),
}


@pytest.mark.parametrize("file", LISTS)
def test_a_saved_set_stays_in_its_folder(file: str, tmp_path: Path) -> None:
    """It could name a pipe, which hangs a start, or another user's data."""
    import datasets

    folder = tmp_path / "data"
    rows = datasets.Dataset.from_dict({"text": [LINES] * 4})
    whole = rows if file == "state.json" else datasets.DatasetDict({"train": rows, "validation": rows})
    whole.save_to_disk(folder)
    read_text(folder)
    lie, quoted = LISTS[file]
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | lie))
    with pytest.raises(UserError, match=rf"{file} asks for {quoted}.*, which is not in the folder"):
        read_text(folder)


CARDS = {
    "data_files: ../secret.txt": r"README\.md asks for \.\./secret\.txt, which is not in the folder",
    "data_files: /etc/passwd": r"README\.md asks for /etc/passwd, which is not",
    "data_files: [{split: train, path: 'http://127.0.0.1:9/x.txt'}]": r"README\.md asks for http://127\.0\.0\.1:9/x",
    "data_files: &a [x]\n  other: *a": r"README\.md has YAML with aliases",
}


@pytest.mark.parametrize("card", CARDS)
def test_a_card_stays_in_its_folder(card: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    lines(folder)
    (tmp_path / "secret.txt").write_text(LINES)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  {card}\n---\n")
    with pytest.raises(UserError, match=CARDS[card]):
        read_text(folder)
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: train.txt\n---\n*fine*\n")
    read_text(folder)


def test_a_linked_folder_that_is_left_out_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As on machines with several disks. Classes that are links are read where all else are images too."""
    elsewhere, folder, pictures = (tmp_path / name for name in ("elsewhere", "data", "pictures"))
    for one in (elsewhere, folder):
        one.mkdir()
        lines(one)
    read_text(folder)
    write_image_folder(pictures, 20, 10)
    linked = next(pictures.glob("train/*"))
    linked.rename(tmp_path / "class")
    linked.symlink_to(tmp_path / "class")
    assert len(images.load(str(pictures), 0, flip=False)[0]) == 20
    assert "note:" not in capsys.readouterr().out
    (folder / "more").symlink_to(elsewhere)
    read_text(folder)
    said = "links to folders are not followed, and what is there is read only if a table names it: "
    assert f"note: --data {folder}: {said}{folder}/more" in capsys.readouterr().out
    (pictures / "notes.txt").write_text("another program reads a folder with this")
    with contextlib.suppress(UserError):
        images.load(str(pictures), 0, flip=False)
    assert f"note: --data {pictures}: {said}{linked}" in capsys.readouterr().out


def test_names_and_contents_are_not_printed_raw(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "set \x1b[2J"
    folder.mkdir()
    lines(folder)
    read_text(folder)
    (folder / "train.txt").unlink()
    (folder / "train \x1b]0;x\x07.jsonl").write_text("no JSON")
    with pytest.raises(UserError) as refusal:
        read_text(folder)
    printed = "".join(capfd.readouterr())
    assert "training and" in printed
    assert "\x1b" not in printed + str(refusal.value)
