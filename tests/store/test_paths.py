"""URLs of flags, what an error says, and which bytes a rank reads."""

import builtins
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from common import UserError
from common.store import place
from common.store.objects import client, keeper, paths, reader
from safetensors.torch import save_file

from tests.store.server import BUCKET, Server


def test_url_is_a_path_in_all_that_checkpoints_need() -> None:
    path = paths.parse("--out", "memory://bucket//a/") / "run"
    assert str(path) == "memory://bucket/a/run"
    assert str(path.parent / "x") == "memory://bucket/a/x"
    assert type(path)(str(path)) == path
    assert str(keeper.Attempt(f"{path}/0a") / "shard-1.safetensors") == "memory://bucket/a/run/shard-1-0a.safetensors"
    with pytest.raises(TypeError):
        os.open(path, os.O_RDONLY)  # a file "memory:/bucket" on this machine


@pytest.mark.parametrize("url", ["s3://user:password@host/x", "s3://bucket/x?X-Amz-Signature=password"])
def test_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UserError, match=r"^--out s3://\.\.\.: a URL with a user, a password or a query") as refusal:
        place.at("--out", url)
    assert "password@" not in str(refusal.value)
    assert "Signature" not in str(refusal.value)


@pytest.mark.parametrize("url", ["s3://", "s3://bucket/../x"])
def test_url_without_a_folder_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="name a bucket and a folder in it"):
        place.at("--out", url)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "gcsfs":
            raise ImportError("No module named 'gcsfs'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match="--out gs://bucket/x needs the package gcsfs: pip install gcsfs"):
        place.at("--out", "gs://bucket/x")


def test_words_hold_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    error = OSError("signed with very-secret: https://host/a?X-Amz-Signature=abc")
    assert client.words(error) == "OSError: signed with $AWS_SECRET_ACCESS_KEY: https://host/a?..."


@pytest.mark.usefixtures("group")
def test_rank_reads_the_rows_that_it_needs(s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"a": torch.arange(4000.0).view(1000, 4), "b": torch.arange(6, dtype=torch.int16), "c": torch.tensor(5.0)}
    save_file(whole, tmp_path / "x.safetensors")
    s3.client().upload_file(str(tmp_path / "x.safetensors"), BUCKET, "c/x.safetensors")
    s3.client().put_object(Bucket=BUCKET, Key="c/MANIFEST.json", Body=b'{"files": {"x.safetensors": {}}}')
    read: list[tuple[int, int]] = []
    real = paths.StorePath.read
    monkeypatch.setattr(paths.StorePath, "read", lambda path, a, b: read.append((a, b)) or real(path, a, b))
    monkeypatch.setattr(reader, "PIECE_BYTES", 100)
    one = paths.parse("--resume", f"s3://{BUCKET}/c")
    storage = one.reader()
    metadata = storage.read_metadata()
    storage.set_up_storage_reader(metadata)
    read.clear()
    target = torch.zeros(20, 2)
    index = next(key for key in metadata.storage_data if key.fqn == "a")
    item = dcp.planner.ReadItem(
        dcp.planner.LoadItemType.TENSOR,
        dcp.metadata.MetadataIndex("a"),
        torch.Size([0, 0]),
        index,
        torch.Size([500, 1]),
        torch.Size([20, 2]),
    )

    class Planner:
        def resolve_tensor(self, _: Any) -> torch.Tensor:
            return target

        def commit_tensor(self, *_: Any) -> None: ...

    storage.read_data(dcp.planner.LoadPlan([item]), Planner())
    assert torch.equal(target, whole["a"][500:520, 1:3])
    assert sum(end - begin for begin, end in read) == 20 * 4 * 4
    assert max(end - begin for begin, end in read) <= 100
    monkeypatch.setattr(reader, "PIECE_BYTES", 2**24)
    read.clear()
    found = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    dcp.load(found, storage_reader=one.reader())
    assert len(read) == 2, "the manifest, and numbers that lie side by side in one request; the header is known"
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
