"""Which tensors of a file are a model's: by name and size, and whether they are weights as they stand."""

from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn

from common import UserError, keymap, ranks

# Ends of the names of what quantised models have beside or in the place of weights.
PACKED = (
    *(".qweight", ".qzeros", ".g_idx", ".scales", ".absmax", ".quant_map", ".SCB", ".weight_format"),
    *(".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_zero_point", "._packed_params", ".input_scale"),
)
QUANTISED = (
    "it is of a quantised model, whose numbers are no weights as they stand. Take the weights that it was made of, or "
    "let its library make them, as by model.dequantize() and save_pretrained(FOLDER)"
)
MOST_PREFIX = 3  # parts of a prefix, such as "base_model.model."
Size = tuple[int | str, ...]


def names_in_model(init: str, found: Mapping[str, Size], wanted: Mapping[str, Size]) -> dict[str, str]:
    """The model's names of tensors of a file, by the file's: with one prefix more or less, where without it none fits.

    Args:
        init: the flag, for a message.
        found: sizes of the tensors in the file, by name.
        wanted: sizes of the model's.
    """
    plain = {name: keymap.canonical(name) for name in found}
    if _fits(plain, found, wanted):
        return plain
    ways = []  # names, and what is said of them
    for prefix in sorted({part for name in plain.values() for part in _prefixes(name)}):
        ours = {name: one.removeprefix(prefix) for name, one in plain.items() if one.startswith(prefix)}
        ways.append((ours, f"without the prefix {prefix!r} of their names"))
    for prefix in sorted({part for name in wanted for part in _prefixes(name)}):
        ways.append(({name: prefix + one for name, one in plain.items()}, f"with the prefix {prefix!r} to their names"))
    names, said = max(ways, key=lambda way: _fits(way[0], found, wanted), default=(plain, ""))
    if 2 * _fits(names, found, wanted) < max(1, min(len(found), len(wanted))):  # a few may fit by chance
        return plain
    ranks.print0(f"init     {init}: the tensors {said}")
    return names


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[:length]) + "." for length in range(1, min(len(parts), MOST_PREFIX + 1)))


def _fits(names: Mapping[str, str], found: Mapping[str, Size], wanted: Mapping[str, Size]) -> int:
    return sum(wanted.get(ours) == found[theirs] for theirs, ours in names.items())


def refuse_packed(init: str, found: Mapping[str, Size], wanted: Mapping[str, Size]) -> None:
    """Refuse numbers that are no weights as they stand: with scales elsewhere, packed, or of another type.

    Args:
        init: the flag.
        found: sizes of the tensors in the file by the model's names; one of no floats has its type, see `size_of`.
        wanted: sizes of the model's tensors.

    Raises:
        UserError: names the tensor and its kind.
    """
    for name, size in found.items():
        kind = _type(size)
        scaled = name not in wanted and name.endswith(PACKED)
        if scaled or (kind and name in wanted and not _type(wanted[name])):
            what = f"{name}, which scales others" if scaled else f"{kind} in {name}"
            raise UserError(f"--init {init} has {what}: {QUANTISED}")


def _type(size: Size) -> str:
    """The type that `size_of` has added, or ""."""
    return size[-1] if size and isinstance(size[-1], str) else ""


def fit(init: str, found: Mapping[str, Size], wanted: Mapping[str, Size]) -> dict[str, str]:
    """The file's names of the tensors that fit, by the model's; lists the rest.

    Args:
        init: the flag.
        found: sizes of the tensors in the file, by name.
        wanted: sizes of the model's.

    Raises:
        UserError: none fits, or the numbers are packed.
    """
    names = names_in_model(init, found, wanted)
    there = {ours: found[theirs] for theirs, ours in names.items()}
    refuse_packed(init, there, wanted)
    fits = {ours: theirs for theirs, ours in names.items() if wanted.get(ours) == found[theirs]}
    left = [f"{name} {size} (there: {there.get(name, 'none')})" for name, size in wanted.items() if name not in fits]
    if not fits:
        name = next(iter(wanted))
        raise UserError(
            f"--init {init}: no tensor has the name and shape of one of the model's, such as {name} {wanted[name]}; "
            f"the file has {next(iter(there.items()), 'nothing')}"
        )
    unused = [name for name in there if name not in wanted and not name.startswith(keymap.NO_WEIGHTS)]
    lists = [f"; {what}: {ranks.listed(ones)}" for what, ones in (("random", left), ("not used", unused)) if ones]
    ranks.print0(f"init     {len(fits)} of {len(wanted)} tensors from {init}{''.join(lists)}")
    return fits


def check_filled(init: str, model: nn.Module, filled: keymap.Tensors, random: Set[str]) -> None:
    """Refuse weights that are not finite, and warn of frozen ones that nothing has filled (all ranks).

    Args:
        init: the flag.
        model: under its strategy.
        filled: this rank's tensors that have been filled.
        random: names of those, of all ranks, that have not.

    Raises:
        UserError: names the first parameter with NaN or an infinity; a buffer, such as a mask, may have them.
    """
    named = {keymap.canonical(name): one for name, one in model.named_parameters()}
    bad = []
    for name in named.keys() & filled.keys():
        tensor: Any = filled[name]
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        bad += [name] * bool(local.is_floating_point() and not torch.isfinite(local).all())
    frozen = [name for name, one in named.items() if not one.requires_grad and name in random]
    everyone = ranks.gather([bad, frozen])
    if broken := sorted({name for one, _ in everyone for name in one}):
        raise UserError(f"--init {init}: {ranks.listed(broken)} has NaN or infinite numbers: the file is damaged")
    if stuck := sorted({name for _, one in everyone for name in one}):
        ranks.print0(
            f"warning: {ranks.listed(stuck)}: random and frozen: train it, "
            f"as by --rates {stuck[0].partition('.')[0]}=1, or start from weights that have it"
        )


def size_of(tensor: torch.Tensor) -> Size:
    """The shape of a tensor of floats, and of another one also its type: the same bits would be other numbers.

    Floats of one byte have a scale somewhere else.
    """
    is_plain = tensor.is_floating_point() and tensor.element_size() > 1
    return (*tensor.shape, *([] if is_plain else [str(tensor.dtype)]))


def fill(weights: keymap.Tensors, tensors: keymap.Tensors) -> None:
    """Copy whole tensors, each of which this rank may hold a part of."""
    for name, tensor in tensors.items():
        tensor.copy_(keymap.part_of(weights[name], tensor))
