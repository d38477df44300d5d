"""The plumbing that all recipes share: how a run is started, stopped, saved and logged. It contains no strategy."""


class UserError(ValueError):
    """An error that a user can make and correct. The message names the value, a right one, and the flag to change.

    Attributes:
        everywhere: whether all ranks raise it after the same collective, so that nobody has to be told.
    """

    everywhere = False


class BadStateError(UserError):
    """State or updates that must not be kept; raised on all ranks.

    Attributes:
        step: the step that computed it, or after which it was found.
    """

    everywhere = True

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step
