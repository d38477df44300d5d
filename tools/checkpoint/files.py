"""Checkpoints and safetensors files: what the commands of `python -m tools.checkpoint` do."""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common import UserError, keymap, manifest, printable
from common.state import checkpoint
from common.store import place

Tensors = dict[str, torch.Tensor]


def inspect(path: str) -> None:
    """Show what a checkpoint holds."""
    folder, facts = checkpoint.choose(place.at("PATH", path))
    files = facts.pop("files")
    print(f"{folder}: {len(files)} file(s), {sum(entry['bytes'] for entry in files.values()) / 1e6:,.1f} MB, undamaged")
    for key, value in facts.items():
        print(printable(f"  {key:10} {json.dumps(value)}"))
    tensors = checkpoint.tensors_in(folder)
    weights = {name: entry for name, entry in tensors.items() if not name.startswith(keymap.NO_WEIGHTS)}
    print(f"  {'tensors':10} {len(weights)} of the model, {len(tensors) - len(weights)} others")
    for name, entry in tensors.items():
        print(printable(f"    {name:60} {str(entry.dtype).removeprefix('torch.'):9} {tuple(entry.shape)}"))


def verify(path: str) -> None:
    """Compare checkpoints with their manifests, and exit with 1 if one is damaged."""
    faults = {folder: manifest.verify(folder)[1] for folder in checkpoint.candidates(place.at("PATH", path))}
    for folder, fault in faults.items():
        print(f"{'DAMAGED' if fault else 'OK     '} {folder}  {fault}".rstrip())
    sys.exit(any(faults.values()))


def export(path: str, out: Path, ema: bool = False) -> None:
    """Write the model's weights, or their average, as one safetensors file."""
    with beside(out) as partial:
        folder, step, tensors = weights(place.at("PATH", path), ema)
        write(tensors, partial, step)
    print(f"{out}: {len(tensors)} tensors of step {step} of {folder}")


def import_(path: Path, out: Path) -> None:
    """Make a checkpoint of step 0 from a safetensors file."""
    with beside(out) as partial:
        tensors = read(path)
        write_start(partial, tensors, path.name)
    print(f"{out}: {len(tensors)} tensors; to train from them, add --resume {out}")


@contextlib.contextmanager
def beside(out: Path) -> Iterator[Path]:
    """Yield a temporary path beside `out`; rename it to `out` at the end, or delete it after an error."""
    if out.exists():
        raise UserError(f"--out {out} exists: use another name, or remove it")
    if (out.parent / manifest.NAME).exists():
        raise UserError(f"--out {out} is in a checkpoint, which may hold only its own files: use another folder")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}")
    partial = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    try:
        yield partial
        partial.replace(out)
    except BaseException:
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
        raise


def weights(path: Path, ema: bool) -> tuple[Path, int, Tensors]:
    """The checkpoint at `path`, its step, and the model's tensors in it, or their averages."""
    folder, facts = checkpoint.choose(path)
    saved = {name: one for name, one in checkpoint.tensors_in(folder).items() if not name.startswith(keymap.NO_WEIGHTS)}
    named = averages_in(folder, saved) if ema else {name: name for name in saved}
    tensors = {named[name]: torch.empty_like(one, device="cpu") for name, one in saved.items()}
    checkpoint.load(folder, tensors)
    return folder, facts["step"], {name: tensors[named[name]] for name in saved}


def averages_in(path: Path, names: Iterable[str]) -> dict[str, str]:
    """By these names of weights, those of their averages in a checkpoint; a frozen weight, which has none, is its own.

    Raises:
        UserError: the checkpoint has no averages, which only a training with --ema keeps.
    """
    saved = checkpoint.tensors_in(path)
    if not any(name.startswith(keymap.AVERAGE) for name in saved):
        raise UserError(f"--ema: {path} has no average of the weights, which only a training with --ema keeps")
    return {name: keymap.AVERAGE + name if keymap.AVERAGE + name in saved else name for name in names}


def read(*paths: Path) -> Tensors:
    """The tensors of safetensors files, by canonical name."""
    try:
        files = [load_file(path) for path in paths]
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{paths[0]} is not a safetensors file ({error}). Pickles (.pt, .pth, .bin) can run code, so this tool "
            "never reads them: save the state dict with safetensors.torch.save_file"
        ) from error
    return {keymap.canonical(name): tensor.contiguous() for file in files for name, tensor in file.items()}


def write(tensors: Tensors, file: Path, step: int) -> None:
    """Write tensors of a step as a safetensors file that others may read as far as the umask lets them."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt", "step": str(step)})
    file.chmod(mode)  # safetensors replaces the file by one that only its owner may read


def write_start(run_dir: Path, tensors: Tensors, source: str) -> None:
    """Write a checkpoint of step 0 without an optimizer."""
    folder = checkpoint.folder(run_dir, 0)
    folder.mkdir(parents=True)
    file = folder / "model.safetensors"
    write(tensors, file, 0)
    manifest.sync(file)
    manifest.write(folder, {"step": 0, "samples": 0, "source": source}, {file.name: manifest.seal(file)})
