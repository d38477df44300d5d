"""Random numbers are fixed by their keys, for all time: a changed hash would reorder every run there is."""

import random

import numpy as np
import pytest
import torch
from common import seed


def splitmix(*keys: int) -> int:
    """The same hash in Python's own integers, which cannot overflow."""
    z = 0
    for key in keys:
        z = (z + key + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        z ^= z >> 31
    return z


def test_published_values_of_splitmix64() -> None:
    # The first output of the generator for these seeds, as other implementations of it print it.
    assert int(seed.mix(0)) == 0xE220A8397B1DCDAF
    assert int(seed.mix(1234567)) == 6457827717110365317


@pytest.mark.parametrize("keys", [(0, 0), (7, 1, 3), (2**64 - 1, 2**63), (1, 2, 3, 4, 5)], ids=str)
def test_equals_python_integers(keys: tuple[int, ...]) -> None:
    assert int(seed.mix(*keys)) == splitmix(*keys)
    assert seed.mix_ints(*keys) == splitmix(*keys)
    assert seed.mix_ints(*map(np.uint64, keys)) == splitmix(*keys), "NumPy's integers overflow"


def test_broadcasts_like_single_keys() -> None:
    rows, columns = np.array([0, 5, 2**40]), np.arange(4)
    found = seed.mix(3, rows[:, None], columns)
    assert found.dtype == np.uint64
    assert found.tolist() == [[splitmix(3, int(row), int(column)) for column in columns] for row in rows]


def test_no_two_keys_collide() -> None:
    """A sum of the keys would: (seed 1, epoch 2, sample 3) and (seed 3, epoch 2, sample 1)."""
    axis = np.arange(40)
    found = seed.mix(axis[:, None, None], axis[:, None], axis)
    shorter = seed.mix(axis[:, None], axis)
    assert len(np.unique(np.concatenate([found.ravel(), shorter.ravel()]))) == 40**3 + 40**2


@pytest.mark.parametrize("position", range(3))
def test_one_bit_of_any_key_changes_half_of_the_result(position: int) -> None:
    keys = [np.arange(2000), np.arange(2000) * 7, np.arange(2000) * 13]
    before = seed.mix(*keys)
    keys[position] = keys[position] ^ 1
    changed = np.unpackbits((before ^ seed.mix(*keys)).view(np.uint8)).reshape(2000, 64)
    assert abs(changed.mean() - 0.5) < 0.01  # 128,000 bits: 7 standard deviations
    assert np.abs(changed.mean(0) - 0.5).max() < 0.06  # each of the 64 bits, 5 standard deviations


def test_uniform_is_uniform() -> None:
    found = seed.uniform(0, seed.AUGMENT, np.arange(100_000))
    assert found.dtype == np.float64
    assert found.min() >= 0
    assert abs(found.mean() - 0.5) < 0.005  # 5 standard deviations
    counts = np.histogram(found, bins=10, range=(0, 1))[0]
    assert np.abs(counts - 10_000).max() < 500
    neighbours = seed.uniform(1, seed.AUGMENT, np.arange(100_000))
    assert abs(np.corrcoef(found, neighbours)[0, 1]) < 0.02


def test_uniform_never_reaches_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seed, "mix", lambda *_: np.uint64(2**64 - 1))
    assert seed.uniform(0) == 1 - 2.0**-53


def test_purposes_are_streams_of_their_own() -> None:
    purposes = [seed.INIT, seed.ORDER, seed.AUGMENT, seed.STEP, seed.HOLD_OUT]
    assert len({int(seed.mix(0, purpose)) for purpose in purposes}) == 5


def draw() -> dict[str, float]:
    return {"random": random.random(), "numpy": np.random.rand(), "torch": torch.rand(()).item()}


@pytest.mark.parametrize("run_seed", range(4))  # 3 hashes to more than 2**63
def test_everything_fixes_all_generators(run_seed: int) -> None:
    seed.everything(run_seed, seed.STEP, 5)
    first = draw()
    second = draw()
    seed.everything(run_seed, seed.STEP, 5)
    assert draw() == first
    assert draw() == second
    seed.everything(run_seed, seed.STEP, 6)
    other = draw()
    for name, value in first.items():
        assert value != second[name], name
        assert value != other[name], name


@pytest.mark.parametrize("run_seed", range(4))
@pytest.mark.parametrize("gpus", [False, True])
def test_everything_draws_what_torch_would(run_seed: int, gpus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, on GPUs as well: a run that began with torch.manual_seed resumes with the same numbers."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    bits = int(seed.mix(run_seed, seed.STEP, 5))
    random.seed(bits)
    np.random.seed(bits % 2**32)
    torch.manual_seed(bits)
    wanted = draw()
    del seeds[:]
    seed.everything(run_seed, seed.STEP, 5)
    assert draw() == wanted
    assert seeds == [bits] * gpus
