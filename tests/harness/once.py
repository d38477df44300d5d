"""What several tests need, made once for all of pytest's processes, by the first that asks for it."""

import pickle
import shutil
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import filelock


class Once:
    """A folder with what has been made, each thing by its name; nobody changes what is there.

    Who asks for what another process makes at the moment waits for it. What could not be made is tried again.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._values: dict[tuple[Hashable, ...], Any] = {}

    def folder(self, make: Callable[[Path], object], *name: Hashable) -> Path:
        """The folder that `make` has filled."""
        path = self._root / "-".join(map(str, name)).replace("/", "_")
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{path}.lock"):
            done = Path(f"{path}.done")
            if not done.exists():
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir()
                make(path)
                done.touch()
        return path

    def value(self, make: Callable[[], Any], *name: Hashable) -> Any:
        """What `make` has returned."""
        if name not in self._values:
            path = self.folder(lambda folder: (folder / "value").write_bytes(pickle.dumps(make())), *name)
            self._values[name] = pickle.loads((path / "value").read_bytes())
        return self._values[name]
