"""Draw who holds what, and what is sent when: `python -m tools.diagrams` writes docs/diagrams/*.svg."""

import tyro

from tools import command
from tools.about import RECIPES, ROOT
from tools.diagrams import draw


def main() -> None:
    """Draw the picture of each recipe from its docstring, into docs/diagrams/."""
    draw.FOLDER.mkdir(exist_ok=True)
    for name in RECIPES:
        (draw.FOLDER / f"{name}.svg").write_text(draw.draw(draw.read(name)))
    print(f"wrote {len(RECIPES)} pictures to {draw.FOLDER.relative_to(ROOT)}")


if __name__ == "__main__":
    with command.one_process():
        tyro.cli(main, prog="python -m tools.diagrams")
