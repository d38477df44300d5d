"""Random cases of bad input, each a function of its seed and number; used by tests/test_fuzz.py.

A case returns "ok", "refused ...", or "FAULT ..." with what is wrong: an error that is not a refusal, a refusal that
nobody can read, or data that came out otherwise than they went in.
"""

import contextlib
import dataclasses
import io
import json
import os
import random
import shutil
import string
import traceback
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import UserError, manifest
from common.run import cli
from common.state import checkpoint
from common.train import sampler, schedule
from common.workloads import cellfree, environments, gpt, image_decode, images, packed, rates, text

from tests.harness import damage, module, runner, states


@dataclasses.dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        family: of which kind.
        seed: of the whole run of the fuzz.
        number: of this case.
        folder: to work in; removed afterwards.
        saved: a run with two checkpoints, to be copied.
        mutant: without the protection that the case is about.
    """

    family: str
    seed: int
    number: int
    folder: Path
    saved: Path
    mutant: bool = False

    @property
    def choose(self) -> random.Random:
        return random.Random(f"{self.family} {self.seed} {self.number}")


def outcome(case: Case, notes: list[str], attempt: Callable[[], str]) -> str:
    """Run one attempt, quietly, and say what came of it; `attempt` returns what is wrong, or "", and adds notes."""
    wrong = _wrong(case, attempt)
    if not wrong or wrong.startswith("refused"):
        return wrong or "ok"
    return f"FAULT {', '.join(notes)}: {wrong}"


def _wrong(case: Case, attempt: Callable[[], str]) -> str:
    warnings.simplefilter("ignore")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            return attempt()
    except UserError as error:
        wrong = "" if _readable(str(error)) else f"a refusal that nobody can read: {str(error)[:500]!r}"
        return wrong or f"refused {error}"
    except SystemExit as error:
        if error.code in (0, 2) and "Traceback" not in printed.getvalue():
            return "refused by the parser"
        return f"exit {error.code}: {printed.getvalue()[-500:]}"
    except BaseException as error:
        stack = "".join(traceback.format_tb(error.__traceback__)[-4:])
        return f"{type(error).__name__}: {str(error)[:300]}\n{stack}"
    finally:
        shutil.rmtree(case.folder, ignore_errors=True)


def _readable(message: str) -> bool:
    """A few lines of printable text, with neither a stack nor a number of a thousand digits."""
    lines = message.splitlines()
    printable = all(line.replace("\t", " ").isprintable() for line in lines)
    return printable and 0 < len(lines) <= 12 and len(message) < 2100 and "Traceback" not in message


# --- flags ------------------------------------------------------------------------------------------------

INTEGERS = (
    *("0", "1", "-1", "2", "7", "-0", "00012", "+3", "1_000", "0x10", "1e3", "2147483647", "2147483648", "1.0", "٣"),
    *(str(2**63), str(2**64), "9" * 25, "9" * 400, "-" + "9" * 400, "9" * 5000, "nan", "inf", "", " ", "many"),
)
FLOATS = (
    *("0", "-0.0", "1e-320", "1e308", "1e309", "1e400", "-1e400", "inf", "-inf", "nan", "infinity", "NaN", "0x1p3"),
    *("1" * 400, "0." + "1" * 400, "1e-400", ".5", "5.", "1,5", "1_0.5", "", "½", "--", "None", "True"),
)
WORDS = (
    "",
    " ",
    "a" * 300,
    "~",
    "~nobody-here",
    "..",
    "/",
    "/dev/null",
    "a\nb",
    "\x1b[31m",
    "\udce9",
    "💥",
    "--lr",
    "%s{}",
)
# Flags that the plan of a training depends on: half of the cases are about these alone.
PLANNED = (
    *("global_batch_size", "micro_batch_size", "max_steps", "epochs", "warmup_steps", "lr", "lr_reference_batch"),
    *("seed", "num_layers", "num_heads", "width", "num_kv_heads", "mlp_width", "num_envs", "rollout_steps"),
    *("access_points", "antennas", "users", "pilots"),
)


def _value(choose: random.Random, hint: Any) -> list[str]:
    if hint is bool:
        return []
    if typing.get_origin(hint) is typing.Literal and choose.random() < 0.5:
        return [str(choose.choice(typing.get_args(hint)))]
    if hint is int:
        return [choose.choice(INTEGERS) if choose.random() < 0.7 else str(int(10 ** choose.uniform(0, 12)))]
    if hint is float:
        return [choose.choice(FLOATS) if choose.random() < 0.7 else repr(10 ** choose.uniform(-12, 12))]
    return [choose.choice(WORDS)]


def try_flags(case: Case) -> str:
    """A recipe's flags, through the parser and the plan of its training."""
    choose = case.choose
    recipe = module.load(choose.choice(runner.RECIPES))
    hints = typing.get_type_hints(recipe.Args)
    argv: list[str] = []
    names = sorted(hints) if choose.random() < 0.5 else [name for name in PLANNED if name in hints]
    for name in choose.sample(names, choose.choice((1, 1, 2, 3))):
        flag = f"--{name.replace('_', '-')}"
        if hints[name] is bool and choose.random() < 0.5:
            flag = f"--no-{flag[2:]}"
        values = _value(choose, hints[name])
        argv += [f"{flag}={values[0]}"] if values and choose.random() < 0.5 else [flag, *values]
    if choose.random() < 0.15:
        case.folder.mkdir()
        argv += ["--config", _config(choose, case.folder, sorted(hints))]
    if choose.random() < 0.1:
        argv.insert(choose.randrange(len(argv) + 1), choose.choice((*WORDS, "-h", "--help", "--x", "-", "--", "@x")))

    def attempt() -> str:
        if case.mutant:
            cli._annotated = lambda *_: iter(())
        args = cli.parse(recipe.Args, argv)
        _plan(args, choose, recipe)
        return ""

    return outcome(case, [recipe.__name__, *(one[:60] for one in argv)], attempt)


def _config(choose: random.Random, folder: Path, names: list[str]) -> str:
    path = folder / "config.json"
    kind = choose.choice(("values", "values", "deep", "bytes", "pipe", "device", "loop", "folder", "missing"))
    if kind == "values":
        values = {choose.choice(names): json_value(choose) for _ in range(choose.randrange(4))}
        path.write_text(json.dumps({"args": values if choose.random() < 0.8 else json_value(choose)}))
    elif kind == "deep":
        path.write_text('{"args": ' + choose.choice(("[", '{"a":')) * choose.choice((500, 100_000)))
    elif kind == "bytes":
        path.write_bytes(choose.randbytes(choose.randrange(200)))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in ("device", "loop"):
        path.symlink_to("/dev/zero" if kind == "device" else path)
    elif kind == "folder":
        path.mkdir()
    return str(path)


def json_value(choose: random.Random, depth: int = 0) -> Any:
    kind = choose.randrange(9 if depth < 3 else 7)
    plain = (None, True, choose.randrange(-5, 5), choose.uniform(-2, 2), 10 ** choose.randrange(400), float("nan"))
    if kind < 6:
        return plain[kind]
    if kind == 6:
        return "".join(choose.choices(string.printable, k=choose.randrange(9)))
    several = [json_value(choose, depth + 1) for _ in range(choose.randrange(4))]
    return several if kind == 7 else {str(i): one for i, one in enumerate(several)}


def _plan(args: Any, choose: random.Random, recipe: Any) -> None:
    """What comes of the flags before there is data, weights or another rank."""
    dp_size = choose.choice((1, 2, 3, 8))
    if hasattr(args, "num_envs"):
        environments.share(args.num_envs, args.rollout_steps, args.global_batch_size, 0, dp_size)
        return
    if hasattr(args, "num_layers"):
        gpt.Shape.of(args, 256)
    if hasattr(args, "rates"):
        rates.parse(args.rates)
    division = sampler.divide_batch(args.global_batch_size, args.micro_batch_size, dp_size)
    progress = choose.choice(({}, {"step": 3, "samples": 384}, {"step": 2**62, "samples": 2**62}))
    lengths = {"run_seed": args.seed, "epochs": getattr(args, "epochs", 1), "max_steps": args.max_steps}
    plan = sampler.make_plan(division, 1433, **lengths, progress=progress)
    assert str(plan)
    assert str(division)
    sampler.check_min_samples(plan, choose.choice((1, 2)))
    assert plan.position(plan.first_step + 1) >= plan.start
    if args.global_batch_size < 10**5 and plan.first_step < plan.max_steps:
        request = next(sampler.training_requests(plan, dp_size - 1))
        assert (request.indices < 1433).all()
    if not hasattr(args, "lr"):
        sizes = recipe.sizes_of(args)
        if sizes.access_points < 10**5:
            assert len(cellfree.grid(sizes.access_points)) == sizes.access_points
        return
    schedule.linear_scaling(args.lr, args.global_batch_size, args.lr_reference_batch)
    for step in (0, 1, plan.max_steps):
        assert 0 <= schedule.warmup_cosine(step, args.warmup_steps, plan.max_steps) <= 1


# --- data -------------------------------------------------------------------------------------------------


def try_data(case: Case) -> str:
    """A folder of images, a table or texts, with something odd in it."""
    choose = case.choose
    case.folder.mkdir()
    kind = choose.choice((_image_folder, _image_folder, _image_table, _texts, _texts, _packed_text))
    notes: list[str] = [kind.__name__]

    def attempt() -> str:
        if case.mutant:
            image_decode._to_8_bits = lambda image, _: image.rotate(90)
            packed.Packed.check = lambda *_: None  # type: ignore[method-assign]
        return kind(choose, case.folder / "data", notes)

    return outcome(case, notes, attempt)


MODES = ("1", "L", "P", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I;16", "I", "F", "HSV", "LAB")
FORMATS = ("png", "png", "tif", "tif", "jpg", "bmp", "gif", "webp", "pgm", "jp2")


def _odd_image(choose: random.Random, path: Path, side: int) -> tuple[str, np.ndarray | None]:
    """Write an image of a random mode; returns it in words, and its pixels (H, W) or (H, W, 3) in 8 bits if known."""
    from PIL import Image

    noise = np.random.default_rng(choose.randrange(2**32))
    mode = choose.choice(MODES)
    truth: np.ndarray | None = None
    if mode == "I;16":
        values = noise.integers(0, choose.choice((300, 2**12, 2**16)), (side, side)).astype(np.uint16)
        image = Image.fromarray(values)
        truth = np.rint(values / 257).astype(np.uint8)
    elif mode in ("I", "F"):
        image = Image.fromarray((noise.random((side, side)) * 1e5).astype(np.int32 if mode == "I" else np.float32))
    else:
        grey = mode in ("1", "L")
        values = noise.integers(0, 256, (side, side) if grey else (side, side, 3)).astype(np.uint8)
        if mode == "1":
            values = (values > 127).astype(np.uint8) * 255
        image = Image.fromarray(values)
        truth = values if mode in ("1", "L", "RGB") else None
        with contextlib.suppress(ValueError):
            image = image.convert(mode)
    how: dict[str, Any] = {}
    if choose.random() < 0.2:
        exif = Image.Exif()
        exif[0x0112] = choose.choice((0, 1, 3, 6, 8, 9, 65535))
        how["exif"] = exif
        truth = None
    if choose.random() < 0.1:
        how |= {"save_all": True, "append_images": [image.copy()]}
    about = f"{mode} {path.suffix} {sorted(how)}"
    try:
        image.save(path, **how)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):  # this format has no such mode
        path = path.with_suffix(".png")
        Image.fromarray(noise.integers(0, 256, (side, side)).astype(np.uint8)).save(path)
        return "L .png", None
    return about, truth if path.suffix in (".png", ".tif", ".bmp", ".pgm") and len(how) == 0 else None


def _image_folder(choose: random.Random, folder: Path, notes: list[str]) -> str:
    """Class folders of PNG files, of which one is odd: its pixels must come out as they went in."""
    from PIL import Image

    side = choose.choice((6, 12, 70))
    for split in ("train", "validation")[: choose.choice((1, 2, 2, 2))]:
        for name in ("a", "b"):
            (folder / split / name).mkdir(parents=True)
            for i in range(3):
                Image.new("L", (side, side), 20 * i + 9).save(folder / split / name / f"{i}.png")
    odd = folder / "train" / "a" / f"0.{choose.choice(FORMATS)}"
    (folder / "train" / "a" / "0.png").unlink()
    about, truth = _odd_image(choose, odd, side)
    notes.append(about)
    odd = next(odd.parent.glob("0.*"))
    truth = truth if _damage_file(choose, odd, notes) else None
    _clutter(choose, folder, notes)
    splits = images.load(str(folder), 0, False)
    for split in splits:
        assert split.digest()
        pixels, labels = split.read(np.zeros(len(split), int), np.arange(len(split)))
        assert pixels.dtype == torch.uint8
        assert len(pixels) == len(labels)
    if truth is None or not (folder / "validation").exists():
        return ""
    train = splits[0]
    found = image_decode.decode(train.rows, 0, train.channels) if train.rows is not None else train.pixels[0]  # type: ignore[index]
    wanted = truth if truth.ndim == 2 else truth.transpose(2, 0, 1)
    same = found.shape[1:] == wanted.shape[-2:] and bool((found.numpy() == wanted).all())
    return "" if same else f"pixels differ: {found.flatten()[:8].tolist()}, not {wanted.flatten()[:8].tolist()}"


def _damage_file(choose: random.Random, path: Path, notes: list[str]) -> bool:
    """Perhaps damage a file; returns whether it is whole."""
    content = bytearray(path.read_bytes())
    kind = choose.choice(("whole", "whole", "whole", "cut", "bits", "bytes", "empty", "pipe", "loop", "device"))
    notes.append(kind)
    if kind == "whole" or not content:
        return True
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind in ("loop", "device"):
        path.symlink_to(path.name if kind == "loop" else "/dev/zero")
    else:
        if kind == "cut":
            content = content[: choose.randrange(len(content))]
        for _ in range(choose.randrange(1, 9) if kind == "bits" else 0):
            content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
        if kind == "bytes":
            content = bytearray(choose.randbytes(choose.randrange(1, 300)))
        path.write_bytes(b"" if kind == "empty" else content)
    return False


def _clutter(choose: random.Random, folder: Path, notes: list[str]) -> None:
    """Perhaps put something beside the images."""
    kind = choose.choice(("none",) * 6 + ("hidden", "name", "class", "notes", "deep", "loop", "nothing", "metadata"))
    notes.append(kind)
    train = folder / "train"
    if kind == "hidden":
        (train / "a" / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
        (folder / "Thumbs.db").write_bytes(choose.randbytes(40))
    elif kind == "name":
        next((train / "b").iterdir()).rename(os.fsdecode(os.fsencode(train / "b") + b"/\xff\xfe.png"))
    elif kind == "class":
        (train / "c").mkdir()
        shutil.copy(next((train / "b").iterdir()), train / "c" / "x.png")
    elif kind == "notes":
        (train / "b" / "notes.txt").write_text("no picture")
    elif kind == "deep":
        (train / "b" / "c" / "d").mkdir(parents=True)
        shutil.copy(next(path for path in (train / "b").iterdir() if path.is_file()), train / "b" / "c" / "d" / "x.png")
    elif kind == "loop":
        (train / "b" / "again").symlink_to(train)
    elif kind == "nothing":
        shutil.rmtree(train / "b")
    elif kind == "metadata":
        (train / "metadata.csv").write_text(choose.choice(("", "file_name\n", "file_name,x\na/0.png,1\n", "x\n1\n")))


def _image_table(choose: random.Random, folder: Path, notes: list[str]) -> str:
    """A table with odd cells."""
    import datasets
    import pyarrow as pa
    from PIL import Image
    from pyarrow import parquet

    folder.mkdir()
    buffer = io.BytesIO()
    Image.new("L", (9, 9), 7).save(buffer, "PNG")
    cells: list[Any] = [{"bytes": buffer.getvalue(), "path": None} for _ in range(6)]
    labels: list[Any] = [0, 1] * 3
    kind = choose.choice(("null", "empty", "garbage", "label", "range", "one row", "no rows", "plain", "text", "file"))
    notes.append(kind)
    i = choose.randrange(6)
    if kind in ("null", "empty", "garbage"):
        content = choose.randbytes(30) if kind == "garbage" else b""
        cells[i] = None if kind == "null" else {"bytes": content, "path": choose.choice((None, "x.png", "/dev/zero"))}
    elif kind in ("label", "range"):
        labels[i] = None if kind == "label" else choose.choice((-1, 2, 2**40))
    number = {"one row": 1, "no rows": 0}.get(kind, 6)
    features = datasets.Features({"image": datasets.Image(), "y": datasets.ClassLabel(names=["a", "b"])})
    kinds = [pa.struct({"bytes": pa.binary(), "path": pa.string()}), pa.int64()]
    table = pa.table([pa.array(cells[:number], kinds[0]), pa.array(labels[:number], kinds[1])], names=["image", "y"])
    if kind != "plain":
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features.to_dict()}})})
    for split in ("train", "validation")[: choose.choice((1, 2))]:
        parquet.write_table(table, folder / f"{split}.parquet")
    if kind == "file":
        _damage_file(choose, folder / "train.parquet", notes)
    if kind == "text":
        return _read_text(folder)
    for split in images.load(str(folder), 0, False):
        _, read = split.read(np.zeros(len(split), int), np.arange(len(split)))
        assert int(read.max()) < len(split.class_names)
    return ""


PIECES = (
    "word ",
    "é",
    "\0",
    "\n",
    "\r\n",
    "\r",
    "\n\n",
    "💥",
    "\u2028",
    "\ufeff",
    "\x85",
    "\x1b[0m",
    "a" * 5000,
    "\t",
    "<s>",
)
ENCODINGS = ("utf-8",) * 6 + ("utf-8-sig", "latin-1", "utf-16", "utf-32", "cp1252")


def _texts(choose: random.Random, folder: Path, notes: list[str]) -> str:
    """Texts of odd characters and encodings: every character must come out as it went in, up to line ends."""
    folder.mkdir()
    written = {}
    for split in ("train", "validation")[: choose.choice((1, 1, 2))]:
        encoding = choose.choice(ENCODINGS)
        content = "".join(choose.choices(PIECES, k=choose.choice((0, 1, 5, 200, 400))))
        notes += [encoding, str(len(content))]
        (folder / f"{split}.txt").write_bytes(content.encode(encoding, "replace"))
        written[split] = content if encoding == "utf-8" else None
    whole = _damage_file(choose, folder / "train.txt", notes) if choose.random() < 0.4 else True
    if not whole:
        return _read_text(folder)
    train, validation = text.load(str(folder), 8)
    _read(train, validation)
    if None in written.values():
        return ""
    one, other = (bytes(split.tokens.astype(np.uint8)).decode() for split in (train, validation))
    if "validation" in written:
        same = one == _lines(written["train"]) and other == _lines(written["validation"])
    else:
        same = sorted((one + other).replace("\n", "")) == sorted(_lines(written["train"]).replace("\n", ""))
    return "" if same else "the text came out otherwise"


def _lines(content: str | None) -> str:
    """A text as Python reads it, each line with one end."""
    content = (content or "").replace("\r\n", "\n").replace("\r", "\n")
    return content if content.endswith("\n") else content + "\n"


def _read_text(folder: Path) -> str:
    _read(*text.load(str(folder), 8))
    return ""


def _read(*splits: text.Text) -> None:
    for split in splits:
        assert split.digest()
        inputs, targets = split.read(np.zeros(len(split), int), np.arange(len(split)))
        assert inputs.shape == targets.shape == (len(split), 8)


def _packed_text(choose: random.Random, folder: Path, notes: list[str]) -> str:
    """A text whose file of packed tokens is damaged between two runs."""
    folder.mkdir()
    (folder / "train.txt").write_text("".join(f"line {i} {choose.random()}\n" for i in range(300)))
    train, _ = text.load(str(folder), 8)
    wanted, digest = train.tokens.tolist(), train.digest()
    path = Path(train.tokens.filename)  # type: ignore[attr-defined]
    before = path.read_bytes()
    while path.exists() and path.is_file() and not path.is_symlink() and path.read_bytes() == before:
        _damage_file(choose, path, notes)
    again, _ = text.load(str(folder), 8)
    _read(again)
    same = again.tokens.tolist() == wanted and again.digest() == digest
    return "" if same else "other tokens"


# --- checkpoints ------------------------------------------------------------------------------------------


def save_two(folder: Path) -> str:
    """Make the run that `try_checkpoint` copies."""
    join()
    for step in (2, 4):
        states.save(folder, step)
    return "saved"


def join() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def try_checkpoint(case: Case) -> str:
    """A run whose newest checkpoint is damaged or odd: what is loaded is what was saved under that step."""
    choose = case.choose
    shutil.copytree(case.saved, case.folder, copy_function=os.link)
    newest, older = checkpoint.committed(case.folder)
    notes = [_spoil(choose, newest) for _ in range(choose.choice((1, 1, 2)))]
    both = choose.random() < 0.15
    if both:
        notes += ["older", _spoil(choose, older)]
    sealed = any(name.startswith("sealed") for name in notes)

    def attempt() -> str:
        join()
        if case.mutant:
            manifest.verify = lambda path, *_: (json.loads((path / manifest.NAME).read_text()), "")
        try:
            found = states.find(case.folder)
        except UserError as error:
            if both:
                raise
            return f"the older one is whole, and not used: {error}"
        if found.path is None:
            return "" if not checkpoint.committed(case.folder) else "a run that has checkpoints would start over"
        step = found.progress["step"]
        if not sealed and step not in (2, 4):
            return f"step {step}"
        wanted = states.make_state(step)
        state = states.blank(wanted)
        checkpoint.load(found.path, state)
        if sealed:
            return ""  # by somebody who can write a manifest: any numbers, but no traceback
        states.check_equal(state, wanted)
        return "" if found.progress["samples"] == 10 * step else "another position"

    return outcome(case, notes, attempt)


def _spoil(choose: random.Random, path: Path) -> str:
    """Do something to a checkpoint, if it is still one; returns it in words."""
    if path.is_symlink() or not path.is_dir() or not (path / manifest.NAME).is_file():
        return "nothing left"
    if not all(file.is_file() for file in path.iterdir()):
        return "a pipe or device is there"  # which the next damage would read for ever
    kind = choose.choice((*damage.DAMAGES, *damage.DAMAGES, *ODD))
    with contextlib.suppress(Exception):  # two damages may not go together
        (damage.DAMAGES.get(kind) or (lambda folder: ODD[kind](choose, folder)))(path)
    return kind


def _flip(choose: random.Random, path: Path) -> None:
    damage.flip_random_bit(choose.choice([file for file in path.iterdir() if file.is_file()]), choose)


def _cut(choose: random.Random, path: Path) -> None:
    file = choose.choice([file for file in path.iterdir() if file.is_file()])
    damage.truncate(file, choose.randrange(file.stat().st_size))


def _random_manifest(choose: random.Random, path: Path) -> None:
    damage.overwrite(path / manifest.NAME, json.dumps(json_value(choose)).encode("utf-8", "replace"))


def _sealed_manifest(choose: random.Random, path: Path) -> None:
    keys = ("step", "samples", "files", "world", "mesh", "seed", "versions", "more")
    damage.rewrite_manifest(path, **{key: json_value(choose) for key in choose.sample(keys, 2)})


def _sealed_files(choose: random.Random, path: Path) -> None:
    entry = {"bytes": choose.choice((0, -1, "many", None)), "sha256": choose.choice(("", 3, None, []))}
    names = ("/dev/zero", "../step_00000002", "a\0b", "", ".", "/", "x" * 400, "\udce9", manifest.NAME, "new")
    damage.rewrite_manifest(path, files={choose.choice(names): choose.choice((entry, None, [], 3))})


def _sealed_tensors(choose: random.Random, path: Path) -> None:
    """A file of tensors with another header, whose digest is right."""
    file = damage.data_file(path)
    content = bytearray(file.read_bytes())
    size = int.from_bytes(content[:8], "little")
    if choose.random() < 0.5:
        content[choose.randrange(8 + size)] = choose.randrange(256)
    else:
        header = json.loads(content[8 : 8 + size])
        name = choose.choice(sorted(header))
        header[name] = json_value(choose) if choose.random() < 0.5 else choose.choice(list(header.values()))
        text_ = json.dumps(header).encode()
        content = bytearray(len(text_).to_bytes(8, "little") + text_) + content[8 + size :]
    damage.overwrite(file, bytes(content))
    damage.rewrite_manifest(path, files={file.name: manifest.seal(file)})


def _rename(choose: random.Random, path: Path) -> None:
    names = ("step_00000999", "step_4", "step_100000000000", "step_", "step_-4", "step_٤", "step_4.tmp-1", "step_1e3")
    path.rename(path.with_name(choose.choice((*names, "step_" + "9" * 200))))


def _swap(choose: random.Random, path: Path) -> None:
    """Files of the other checkpoint, under the same names."""
    other = next(one for one in checkpoint.committed(path.parents[1]) if one != path)
    name = choose.choice(sorted(file.name for file in path.iterdir()))
    damage.overwrite(path / name, (other / name).read_bytes())


def _add(choose: random.Random, path: Path) -> None:
    """Something that a checkpoint does not have."""
    file = path / choose.choice(
        ("a.safetensors", ".b.safetensors", "z\udce9.safetensors", "notes", "x.json", ".metadata")
    )
    kind = choose.randrange(5)
    if kind == 0:
        os.mkfifo(file)
    elif kind == 1:
        file.mkdir()
    elif kind == 2:
        file.symlink_to("/dev/zero")
    elif kind == 3:
        file.symlink_to(file)
    else:
        file.write_bytes(choose.randbytes(choose.randrange(100)))


def _file_in_place(choose: random.Random, path: Path) -> None:
    shutil.rmtree(path)
    if choose.random() < 0.3:
        os.mkfifo(path)
    elif choose.random() < 0.5:
        path.write_bytes(choose.randbytes(9))
    else:
        path.symlink_to(choose.choice(("/dev/zero", "nowhere", "..", path.name, "step_00000002")))


ODD: dict[str, Callable[[random.Random, Path], None]] = {
    "random bit": _flip,
    "random cut": _cut,
    "random manifest": _random_manifest,
    "sealed manifest": _sealed_manifest,
    "sealed files": _sealed_files,
    "sealed tensors": _sealed_tensors,
    "another name": _rename,
    "swapped file": _swap,
    "another file": _add,
    "no folder": _file_in_place,
}
