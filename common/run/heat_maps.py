"""Values that make a table, such as the load of each layer and expert, as a picture for TensorBoard."""

from collections.abc import Iterator, Mapping

import torch


def of(values: Mapping[str, float]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and picture, (H, W), of all values that are called NAME/ROW/COLUMN: from 0, black, to the largest, 1.

    What is negative or not finite is black. A part of another value, such as train/loss/web beside train/loss, belongs
    to no table.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for tag, one in values.items():
        if "/" in (row := tag.rpartition("/")[0]) and row not in values:
            found.setdefault(row.rpartition("/")[0], {}).setdefault(row, []).append(one if 0 < one < torch.inf else 0.0)
    for name, rows in found.items():
        table = torch.nn.utils.rnn.pad_sequence([*map(torch.tensor, rows.values())], batch_first=True)
        yield name, (table / table.max().clamp(min=1e-30)).kron(torch.ones(16, 16))
