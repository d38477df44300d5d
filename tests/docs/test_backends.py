"""The table of backends in docs/glossary.md is what the installed torch says of itself."""

import re

import pytest
import torch
import torch.distributed as dist

from tests.harness import runner

PAGE = runner.ROOT / "docs" / "glossary.md"
HELD = {"all": True, "of CUDA": torch.version.cuda is not None, "none": False}


def table(page: str) -> dict[str, tuple[list[str], bool]]:
    """By backend: the devices whose tensors it takes, and whether the installed torch holds it."""
    rows = [
        line.strip("| ").split(" | ")
        for line in page.split("## Backends")[1].split("\n## ", maxsplit=1)[0].splitlines()
    ]
    found = {row[0].lower(): row for row in rows if len(row) == 6 and row[0] != "backend"}
    return {name: (row[1].split(", "), HELD[re.split("[:]", row[5])[0]]) for name, row in found.items()}


def asked() -> dict[str, tuple[list[str], bool]]:
    """The same, of torch."""
    held = {"nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available(), "mpi": dist.is_mpi_available()}
    return {name: (dist.Backend.backend_capability[name], held[name]) for name in held}


def test_table_is_what_torch_says() -> None:
    assert table(PAGE.read_text()) == asked()


@pytest.mark.parametrize(
    ("old", "new"), [("| NCCL | cuda |", "| NCCL | cpu, cuda |"), ("| none: built", "| all: built")]
)
def test_wrong_table_is_found(old: str, new: str) -> None:
    page = PAGE.read_text()
    assert page.count(old) == 1
    assert table(page.replace(old, new)) != asked()


def test_gloo_adds_up_tensors_of_the_cpu() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ones = torch.ones(3)
        dist.all_reduce(ones)
        assert ones.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()


def test_backend_that_cannot_be_used_is_refused() -> None:
    """MPI by a torch that was built without it, NCCL by a machine without GPUs: each names what is missing."""
    with pytest.raises(RuntimeError, match="MPI"):
        dist.init_process_group("mpi")
    if dist.is_nccl_available() and not torch.cuda.is_available():
        with pytest.raises((RuntimeError, ValueError), match=r"no GPUs found|at least one CUDA device"):
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()
