"""What the commands of the course print: `uv run python -m benchmarks.course` writes it into docs/course.

Each chapter names one command, which ends within a minute on two cores. Its last part shows that the strategies give
the losses of each other, where a chapter says so.
"""

import argparse
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

from tests.harness import pages
from tests.harness.runner import ROOT

TWO = "torchrun --nproc-per-node 2 recipes/{}/bare.py {}"
STOPPED = TWO.format("ddp_resnet", "--epochs 1 --checkpoint {folder}/ddp.pt")
COMMANDS = {  # of each chapter
    "01-one-process": ["python recipes/dp_resnet/bare.py --epochs 1"],
    "02-ddp": [TWO.format("ddp_resnet", "--epochs 2")],
    "03-all-reduce": [TWO.format("allreduce_resnet", "--epochs 1")],
    "04-accumulation": [TWO.format("multinode_resnet", "--epochs 1")],
    "05-checkpoints": [STOPPED, STOPPED.replace("--epochs 1", "--epochs 2")],
    "06-fsdp": [TWO.format("fsdp_gpt", "--steps 20")],
    "07-tensor": [TWO.format("tensor_gpt", "--steps 20")],
    "08-pipeline": [TWO.format("pipeline_gpt", "--steps 20")],
    "09-context": [TWO.format("context_gpt", "--steps 20")],
    "10-slow-links": [TWO.format("diloco_gpt", "--steps 20")],
}


def page(chapter: str) -> Path:
    """Its file."""
    return ROOT / "docs" / "course" / f"{chapter}.md"


def printed(command: str, folder: str) -> str:
    """A command as the page shows it, and the lines that it prints about the training."""
    done = subprocess.run(
        shlex.split(command.format(folder=folder)),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    lines = re.findall(r"^(?:epoch|step) .*", done.stdout, re.MULTILINE)
    assert lines, done
    return "\n".join([f"$ {command.replace('{folder}/', '')}", *lines])


def main() -> None:
    """Run the commands of the chapters that are named, or of all, and write what they print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chapters", nargs="*", default=[*COMMANDS], metavar="CHAPTER", help=", ".join(COMMANDS))
    for chapter in parser.parse_args().chapters:
        with tempfile.TemporaryDirectory() as folder:
            shown = "\n".join(printed(command, folder) for command in COMMANDS[chapter])
        about = pages.measured(f"uv run python -m benchmarks.course {chapter}", "gloo, 1 thread each")
        pages.write(page(chapter), printed=f"```\n{shown}\n```\n\n{about}")
        print(f"{page(chapter).relative_to(ROOT)}\n{shown}", flush=True)


if __name__ == "__main__":
    main()
