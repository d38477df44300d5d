"""Which values are a table, and what its picture shows; tests/run/test_log.py reads one from TensorBoard's file."""

from common.run import heat_maps


def test_odd_tables_have_heat_maps() -> None:
    """A shorter row ends in black, and so is what is no number; nothing else is a table."""
    nan, inf = float("nan"), float("inf")
    found = heat_maps.of({"a/load/0/0": 2.0, "a/load/0/1": nan, "a/load/1/0": 1.0, "perf/mfu": 1.0, "loss": 1.0})
    assert {name: table[::16, ::16].tolist() for name, table in found} == {"a/load": [[1, 0], [0.5, 0]]}
    ((_, black),) = heat_maps.of({"load/0/0": 0.0, "load/0/1": -1.0, "load/0/2": inf})
    assert not black.any()
