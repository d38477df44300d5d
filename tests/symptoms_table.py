"""Write by what one notices each mistake that tools.judge knows: `python -m tests.symptoms_table`."""

from tools.judge import page

from tests.harness import pages
from tools import about

PAGE = about.ROOT / "docs" / "troubleshooting.md"

if __name__ == "__main__":
    pages.write(PAGE, symptoms=page.symptoms())
