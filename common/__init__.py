"""The plumbing that all recipes share: how a run is started, stopped, saved and logged. It contains no strategy."""

__version__ = "0.2.0"  # of Brigade, also in a copy; pyproject.toml reads it here
MOST_SHOWN = 2_000  # characters of an error


def printable(text: str, most: int = MOST_SHOWN) -> str:
    """Text that may come from a file or another rank, as it is shown to people.

    It has no control characters, which could change what a terminal shows, and no middle if it is longer than `most`.
    """
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return "".join(one if one.isprintable() or one in "\n\t" else "?" for one in text)


class UserError(ValueError):
    """An error that a user can make and correct. The message names the value, a right one, and the flag to change.

    Attributes:
        everywhere: whether all ranks raise it after the same collective, so that nobody has to be told.
        config: config.json of the run whose flags would be right, if there is one.
    """

    everywhere = False
    config = ""

    def __str__(self) -> str:
        """The message, which may quote a file."""
        return printable(super().__str__())


class BadStateError(UserError):
    """State or updates that must not be kept; raised on all ranks.

    Attributes:
        step: the step that computed it, or after which it was found.
    """

    everywhere = True

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step
