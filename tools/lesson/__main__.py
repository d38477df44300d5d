"""What changes from one recipe to the next: `python -m tools.lesson ddp_resnet fsdp_gpt` prints the diff as a lesson."""

from pathlib import Path
from typing import Annotated

import tyro

from common import UserError
from tools import command
from tools.lesson import diff, show


def main(
    before: Annotated[str, tyro.conf.Positional],
    after: Annotated[str, tyro.conf.Positional],
    train: bool = False,
    context: Annotated[int, tyro.conf.arg(metavar="LINES")] = 3,
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
) -> None:
    """Print what changes from one recipe to another, section by section and without docstrings.

    Args:
        before: a recipe, such as ddp_resnet, or the path of any Python file.
        after: another one.
        train: compare their train.py, by its banners, instead of their bare.py, by its functions.
        context: unchanged lines around each change; 0 for none.
        html: write the lesson as a page for a browser, instead of printing it.
    """
    if context < 0:
        raise UserError(f"--context {context} must not be negative: give 0 for no unchanged lines")
    lesson = diff.lesson(before, after, "train.py" if train else "bare.py")
    if html:
        html.write_text(show.page(lesson, context), encoding="utf-8")
        print(f"wrote {html}: {lesson.count()}")
    else:
        print(show.text(lesson, context, show.has_colours()))


if __name__ == "__main__":
    with command.one_process():
        try:
            tyro.cli(main, prog="python -m tools.lesson")
        except UserError as error:
            command.refuse(error)
