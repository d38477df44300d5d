"""A tracker that a package adds by an entry point: it writes what it gets to a file, and fails as it is told to."""

import json
import os
import time
from pathlib import Path

from common.track.services import About, Service


def begin(about: About) -> Service:
    """Begin a run. STAND_IN names the file, STAND_IN_FAULT what goes wrong."""
    fault = os.environ.get("STAND_IN_FAULT", "")
    token = os.environ.get("STAND_IN_TOKEN", "")

    def write(**what: object) -> None:
        with Path(os.environ["STAND_IN"]).open("a") as file:
            file.write(json.dumps(what) + "\n")

    def log(step: int, values: object) -> None:
        if fault == "raises":
            raise RuntimeError(f"no such run (token {token})")
        while fault == "hangs":
            time.sleep(1)
        write(step=step, values=values)

    if fault == "raises at the start":
        raise ConnectionError(f"https://me:{token}@host/run?key=1 is away")
    write(begins=about.id, name=about.name, config=about.config, has_key="RUN_KEY" in os.environ)
    return Service("here", "17", log, lambda done: write(done=done))


def install(folder: Path) -> None:
    """Make a package of this file, as pip does."""
    info = folder / "stand_in-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[brigade.trackers]\nstand-in = stand_in:begin\n")
    (folder / "stand_in.py").write_text(Path(__file__).read_text())
