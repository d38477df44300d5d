"""Faults that are planted in a copy of the repository, one at a time: the tests must see each. See `__main__`."""
