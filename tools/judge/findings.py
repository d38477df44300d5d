"""A finding: a kind of mistake, the line, and what was seen."""

from dataclasses import dataclass, field

from tools.judge import kinds_around, kinds_files, kinds_training
from tools.judge.kind import Kind

KINDS = kinds_training.KINDS | kinds_around.KINDS | kinds_files.KINDS


@dataclass(frozen=True)
class Finding:
    """A mistake of a script: its kind, the line, and what was seen."""

    kind: str
    at: str
    evidence: str
    sizes: dict[str, float] = field(default_factory=dict)

    @property
    def about(self) -> Kind:
        """What is said of the kind."""
        return KINDS[self.kind]
