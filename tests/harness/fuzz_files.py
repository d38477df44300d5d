"""Random files of the kinds that others hand over: pictures, token files, weights, tokenizers, configurations, tables.

Each is cut, changed, swapped for a pipe, a device or a file of another format, or has a lie in its header. In the PATH
lies a `gs` that leaves a mark, and files that pretend to be others unpickle to the same mark: none may be left.
"""

import contextlib
import functools
import io
import json
import os
import pickle
import random
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from common.state import start
from common.workloads import documents, gpt, gpt_names, image_decode, parsing, pretrained, text, token_files

from tests.harness import fuzz

MEMORY_BYTES = 2**33  # beyond what a process has: a header may ask for more than any machine has
DEPTH = 100_000
MARK = "mark"


class Bomb:
    """Unpickled, it leaves the mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self.mark,)


@functools.cache
def _limit_memory() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def others(mark: Path) -> dict[str, bytes]:
    """Contents of other formats, some of which run code where they are opened without care."""
    bomb = Bomb(mark)
    saved, zipped = io.BytesIO(), io.BytesIO()
    torch.save(bomb, saved)
    with zipfile.ZipFile(zipped, "w") as file:
        file.writestr("../../escaped", "x")
    box = b"%%BoundingBox: 0 0 9 9\n"
    return {
        "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n" + box + b"%%EndComments\n(x) run\n%%EOF\n",
        "pickle": pickle.dumps(bomb),
        "torch": saved.getvalue(),
        "zip": zipped.getvalue(),
        "brackets": b"[" * DEPTH,
        "JSON": b'{"a": [1, Infinity, ' + b"9" * 5000 + b"]}",
        "ELF": b"\x7fELF" + bytes(200),
        "parquet": b"PAR1" + bytes(90) + struct.pack("<I", 2**31 - 1) + b"PAR1",
        "arrow": b"ARROW1\0\0" + b"\xff" * 64 + b"ARROW1",
        "text": b"\x1b[2J\x1b]0;owned\x07 text\n" * 9,
    }


def spoil(choose: random.Random, path: Path, notes: list[str]) -> bool:
    """Perhaps do something to a file; returns whether it is as it was."""
    content = bytearray(path.read_bytes())
    kinds = ("cut", "bits", "head", "bytes", "empty", "pipe", "device", "loop", "nowhere", "folder")
    kind = choose.choice(("whole", *choose.sample(kinds, 2), "other"))
    notes.append(kind)
    if kind == "whole":
        return True
    path.unlink()
    links = {"device": "/dev/zero", "loop": path.name, "nowhere": "nowhere"}
    if kind in links:
        path.symlink_to(links[kind])
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "other":
        name, content_ = choose.choice(sorted(others(path.parents[1] / MARK).items()))
        notes.append(name)
        path.write_bytes(content_)
    else:
        if kind == "cut":
            content = content[: choose.randrange(len(content))]
        for _ in range(choose.randrange(1, 9) if kind in ("bits", "head") else 0):
            content[choose.randrange(min(len(content), 64) if kind == "head" else len(content))] = choose.randrange(256)
        path.write_bytes({"empty": b"", "bytes": choose.randbytes(choose.randrange(1, 300))}.get(kind, content))
    return False


def lie(choose: random.Random, value: Any) -> Any:
    """A JSON value with something else in one or two places."""
    value = json.loads(json.dumps(value))
    for _ in range(choose.choice((1, 1, 2))):
        here = value
        while True:
            keys = list(here) if isinstance(here, dict) else list(range(len(here)))
            key = choose.choice(keys)
            if isinstance(here[key], dict | list) and here[key] and choose.random() < 0.7:
                here = here[key]
                continue
            odd = (0, -1, 2**40, 2**64, 10**400, "\x1b[2J", float("inf"), float("nan"), [], {}, None, "1", True)
            here[key] = choose.choice(odd) if choose.random() < 0.7 else fuzz.json_value(choose)
            break
    return value


def _try(case: fuzz.Case, kind: Callable[[random.Random, Path, list[str]], None], mutate: Callable[[], None]) -> str:
    """One case: `kind` makes files in a folder and reads them as a recipe does."""
    notes: list[str] = []
    folder = case.folder / "data \x1b[2J"
    folder.mkdir(parents=True)
    program = case.folder / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n: > '{case.folder / MARK}'\n")
    program.chmod(0o755)

    def attempt() -> str:
        path = os.environ["PATH"]
        os.environ["PATH"] = f"{program.parent}:{path}"
        try:
            kind(case.choose, folder, notes)
        finally:
            os.environ["PATH"] = path
            if (case.folder / MARK).exists():
                raise RuntimeError("a file has run code")
        return ""

    _limit_memory()
    if case.mutant:
        mutate()
    return fuzz.outcome(case, notes, attempt)


def _show_raw() -> None:
    common.UserError.__str__ = ValueError.__str__  # type: ignore[method-assign]


# --- pictures ---------------------------------------------------------------------------------------------


def _picture(choose: random.Random, folder: Path, notes: list[str]) -> None:
    import datasets
    from PIL import Image

    path = folder / f"0.{choose.choice(fuzz.FORMATS)}"
    pixels = np.random.default_rng(choose.randrange(2**32)).integers(0, 256, (9, 7, 3)).astype(np.uint8)
    with contextlib.suppress(OSError):
        Image.fromarray(pixels).save(path)
    whole = path.exists() and spoil(choose, path, notes)
    row = {"bytes": None, "path": str(path)}
    if choose.random() < 0.3 and path.is_file():
        row = {"bytes": path.read_bytes(), "path": choose.choice((None, "/dev/zero", "x.png"))}
    features = datasets.Features({"image": datasets.Image(decode=False)})
    rows = datasets.Dataset.from_dict({"image": [row]}, features=features)
    image_decode.content(row, only_size=choose.random() < 0.5)
    found = image_decode.decode(rows, 0, choose.choice((0, 1, 3)), least_side=choose.choice((0, 4)))
    assert found.dtype == torch.uint8
    assert not whole or found.shape[1:] == (9, 7)


def _any_format() -> None:
    image_decode.FORMATS = None  # type: ignore[assignment]


def try_picture(case: fuzz.Case) -> str:
    """An encoded image."""
    return _try(case, _picture, _any_format)


# --- token files ------------------------------------------------------------------------------------------


def _tokens(choose: random.Random, folder: Path, notes: list[str]) -> None:
    import datasets

    tokens = np.array(choose.choices(range(200), k=400))
    kind = choose.choice(("nanoGPT", "llm.c", "Megatron"))
    notes.append(kind)
    path = folder / "train.bin"
    odd = (0, 1, -1, -506, 399, 401, 2**31 - 1)
    lies = choose.random() < 0.4
    if kind == "nanoGPT":
        path.write_bytes(tokens.astype(np.uint16).tobytes())
    elif kind == "llm.c":
        header = np.zeros(256, np.int32)
        header[:3] = (20240520, 1, choose.choice(odd) if lies else 400)
        path.write_bytes(header.tobytes() + tokens.astype(np.uint16).tobytes())
        if lies and choose.random() < 0.3:
            path.write_bytes(header[:3].tobytes())
    else:
        path.write_bytes(tokens.astype(np.uint16).tobytes())
        sizes = np.array([choose.choice(odd), 400] if lies else [100, 300], np.int32)
        counts = (choose.choice((0, 2, 2**40, 2**62)) if lies else 2, choose.choice((0, 3, 2**62)) if lies else 3)
        code = choose.choice((8, 8, 8, 4))
        index = token_files.MEGATRON_HEADER.pack(token_files.MEGATRON_MAGIC, 1, code, *counts)
        starts = np.array([0, sizes[0] * token_files.MEGATRON_TYPES[code]().itemsize])
        (folder / "train.idx").write_bytes(index + sizes.tobytes() + starts.tobytes() + bytes(8 * 3))
    if choose.random() < 0.6:
        spoil(choose, choose.choice(sorted(folder.iterdir())), notes)
    sets = text.load(str(folder), 8)
    cache = datasets.config.HF_DATASETS_CACHE / "packed"
    kept = max(cache.glob("*.vocabulary"), key=lambda file: file.stat().st_mtime_ns)
    wanted = sets[0].vocab_size
    kept.write_bytes(choose.choice((b"", b"7", b"-5", b"1000000000000", b"\xff\xfe", b"9" * 5000, kept.read_bytes())))
    assert text.load(str(folder), 8)[0].vocab_size == wanted, "another vocabulary"
    for split in sets:
        split.read(np.zeros(len(split), int), np.arange(len(split)))


def _trust_what_is_kept() -> None:
    token_files._kept = lambda file, _: int(file.read_text()) if file.exists() else 0


def try_tokens(case: fuzz.Case) -> str:
    """A file of packed tokens, and the kept size of its vocabulary."""
    return _try(case, _tokens, _trust_what_is_kept)


# --- weights and configurations ---------------------------------------------------------------------------


def _weights(choose: random.Random, folder: Path, notes: list[str]) -> None:
    from safetensors.torch import save

    fuzz.join()
    model = torch.nn.Linear(3, 2)
    state = {name: one.detach().clone() for name, one in model.state_dict().items()}
    kind = choose.choice(("safetensors", "folder", "pth", "bin"))
    notes.append(kind)
    path = folder / ("model.safetensors" if kind == "folder" else f"w.{kind}")
    if kind in ("safetensors", "folder"):
        content = save(state)
        if choose.random() < 0.4:
            notes.append("lie")
            size = int.from_bytes(content[:8], "little")
            header = json.dumps(lie(choose, json.loads(content[8 : 8 + size]))).encode()
            size = choose.choice((len(header), len(header), 0, 2**31, 2**63))
            content = size.to_bytes(8, "little") + header + content[8 + size :]
        path.write_bytes(content)
    else:
        torch.save(choose.choice((state, {"state_dict": state}, {"model": {"weight": 3}}, [state], 7)), path)
    spoil(choose, path, notes)
    start.begin_with(str(folder if kind == "folder" else path), model)


def _unpickle() -> None:
    load = torch.load
    torch.load = lambda *args, **kwargs: load(*args, **kwargs | {"weights_only": False})
    assert pretrained.torch is torch


def try_weights(case: fuzz.Case) -> str:
    """A file of weights."""
    return _try(case, _weights, _unpickle)


SHAPE = gpt.Shape(32, 1, 2, 8, mlp_width=8)


def _configuration(choose: random.Random, folder: Path, notes: list[str]) -> None:
    from safetensors.torch import save_file

    fuzz.join()
    model = gpt.GPT(SHAPE)
    theirs = gpt_names.names(SHAPE)
    save_file(
        {theirs[name]: one.detach().clone() for name, one in model.state_dict().items()}, folder / "m.safetensors"
    )
    config = gpt_names.to_config(SHAPE) | {"rope_scaling": None}
    if choose.random() < 0.6:
        config = lie(choose, config)
        notes.append("lie")
    (folder / "config.json").write_text(json.dumps(config))
    if choose.random() < 0.4:
        spoil(choose, folder / "config.json", notes)
    start.begin_with(str(folder), model)


def try_configuration(case: fuzz.Case) -> str:
    """A config.json of Hugging Face."""
    return _try(case, _configuration, _show_raw)


# --- tokenizers -------------------------------------------------------------------------------------------

TOKENIZER = {
    **{"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None},
    "added_tokens": [
        {
            **{"id": 256, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False},
            **{"normalized": False, "special": True},
        }
    ],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "decoder": None,
    "model": {
        **{"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None},
        **{"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "merges": []},
        "vocab": {chr(33 + i): i for i in range(256)},
    },
}
TEMPLATES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}",
    "{{ raise_exception('\x1b[2J' * 900) }}",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 1 / 0 }}{{ x.y.z }}",
    "{% if",
    "{{" * 500,
)


def _tokenizer(choose: random.Random, folder: Path, notes: list[str]) -> None:
    import datasets

    path = folder / "tokenizer.json"
    config = {"eos_token": "</s>", "chat_template": choose.choice(TEMPLATES)}
    path.write_text(json.dumps(lie(choose, TOKENIZER) if choose.random() < 0.6 else TOKENIZER))
    (folder / "tokenizer_config.json").write_text(json.dumps(lie(choose, config) if choose.random() < 0.3 else config))
    (folder / "chat_template.jinja").write_text(choose.choice(TEMPLATES))
    if choose.random() < 0.5:
        spoil(choose, choose.choice(sorted(folder.iterdir())), notes)
    vocabulary = documents.load_tokenizer(str(path))
    chats = [[{"role": "user", "content": "hi \x1b[2J"}], []]
    rows = datasets.Dataset.from_dict({"text": ["some text", "é 字 \0 \x1b[2J"], "chat": chats})
    encoder = documents.Encoder("set", rows, vocabulary, choose.choice(("", "chat", "text,chat")))
    tokens, _ = encoder.encode(rows[:])
    assert not len(tokens) or int(tokens.max()) < encoder.vocab_size


def try_tokenizer(case: fuzz.Case) -> str:
    """A tokenizer.json, and the files beside it."""
    return _try(case, _tokenizer, _show_raw)


# --- tables -----------------------------------------------------------------------------------------------

CARDS = (
    "---\nconfigs:\n- config_name: default\n  data_files: ../mark\n---\n",
    "---\nconfigs:\n- config_name: default\n  data_files: http://127.0.0.1:9/x.txt\n---\n",
    "---\na: &a [x, x]\nb: &b [*a, *a]\nconfigs: [*b, *b]\n---\n",
    "---\nconfigs: !!python/object/apply:os.system ['touch mark']\n---\n",
    "---\nconfigs: " + "[" * 2000 + "\n---\n",
    "---\nlicense: mit\n---\n# A set\n",
)


def _table(choose: random.Random, folder: Path, notes: list[str]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    kind = choose.choice(("parquet", "jsonl", "csv", "arrow", "json", "brackets"))
    notes.append(kind)
    rows = [{"text": f"line {i} {choose.random()}"} for i in range(40)]
    path = folder / f"train.{'jsonl' if kind == 'brackets' else kind}"
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "arrow":
        table = pa.Table.from_pylist(rows)
        with path.open("wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    elif kind == "csv":
        path.write_text("text\n" + "\n".join(row["text"] for row in rows))
    elif kind == "brackets":
        path.write_bytes(b'{"text": ' + b"[" * DEPTH + b"]" * DEPTH + b"}\n")
    else:
        lines = [json.dumps(lie(choose, row) if choose.random() < 0.1 else row) for row in rows]
        path.write_text("\n".join(lines) if kind == "jsonl" else f"[{','.join(lines)}]")
    spoil(choose, path, notes)
    if choose.random() < 0.3:
        (folder / "README.md").write_text(choose.choice(CARDS))
        notes.append("card")
    for split in text.load(str(folder), 8):
        split.read(np.zeros(len(split), int), np.arange(len(split)))


def _parse_here() -> None:
    parsing.prepare = lambda *_: ""


def try_table(case: fuzz.Case) -> str:
    """A table of texts, and the README.md beside it."""
    return _try(case, _table, _parse_here)


FAMILIES: dict[str, Callable[[fuzz.Case], str]] = {
    "picture": try_picture,
    "tokens": try_tokens,
    "weights": try_weights,
    "configuration": try_configuration,
    "tokenizer": try_tokenizer,
    "table": try_table,
}
