"""Inspect and verify checkpoints, and convert them to and from one safetensors file: `python -m tools.checkpoint`."""

from pathlib import Path

from tools import command
from tools.command import Kept, Source


def inspect(path: Kept) -> None:
    """Show what a checkpoint holds; PATH is one, or a run for its newest undamaged one, here or on s3://."""
    from tools.checkpoint import files

    files.inspect(path)


def verify(path: Kept) -> None:
    """Compare a checkpoint, or all of a run, here or on s3://, with the manifest; exits with 1 if one is damaged."""
    from tools.checkpoint import files

    files.verify(path)


def export(path: Kept, out: Path, ema: bool = False) -> None:
    """Write the model's weights as one safetensors file, whatever strategy and number of ranks saved them.

    Args:
        path: a checkpoint, or a run's folder for its newest undamaged checkpoint, here or on s3://.
        out: the file to write; it must not exist yet.
        ema: write the average of the weights that a training with --ema keeps.
    """
    from tools.checkpoint import files

    files.export(path, out, ema)


def import_(path: Source, out: Path) -> None:
    """Make a checkpoint of step 0 from a safetensors file, for --resume; the optimizer starts fresh.

    Args:
        path: the file; its names may have the prefixes of DataParallel, DDP and torch.compile.
        out: the folder to create, for --resume.
    """
    from tools.checkpoint import files

    files.import_(path, out)


if __name__ == "__main__":
    command.run(
        {"inspect": inspect, "verify": verify, "export": export, "import": import_}, "tools.checkpoint", __doc__
    )
