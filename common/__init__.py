"""The plumbing that recipes share: how a run is run. No strategy is in here."""


class UserError(ValueError):
    """What a user can get wrong. The message names the value, what would be right, and the flag to change."""
