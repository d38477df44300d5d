"""The next image takes the place of one that cannot be decoded: always the same one, and never without a word."""

from pathlib import Path

import numpy as np
import pytest
import torch
from common import UserError, ranks
from common.train import data
from common.workloads import image_decode, images, unreadable
from PIL import Image

from tests.harness import runner

EACH = 30  # images of a class
NOTE = "note: --skip-unreadable: "


def write_folder(root: Path, side: int, broken: tuple[str, ...], train_each: int = EACH) -> Path:
    """Two classes; the images that are called as in `broken` are cut off."""
    for split, each in (("train", train_each), ("validation", 4)):
        for label, name in enumerate(("cat", "dog")):
            for i in range(each):
                path = root / split / name / f"{i:02d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                noise = np.random.default_rng(100 * label + i).integers(0, 256, (side, side, 3), dtype=np.uint8)
                Image.fromarray(noise).save(path)
                if f"{split}/{name}/{path.name}" in broken:
                    path.write_bytes(path.read_bytes()[:90])
    return root


BROKEN = ("train/cat/07.png", "train/dog/12.png", "train/dog/13.png")


def load(root: Path) -> tuple[images.Images, images.Images]:
    return images.load(str(root), 0, flip=False, skip_unreadable=True)


@pytest.mark.parametrize("side", [8, 80], ids=["in memory", "large"])
def test_the_next_one_takes_its_place(
    side: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own label, in any batch; every other sample is as without the flag."""
    monkeypatch.setattr(ranks, "gather", lambda value: [value])
    whole, _ = load(write_folder(tmp_path / "whole", side, ()))
    train, validation = load(write_folder(tmp_path / "broken", side, BROKEN))
    assert len(train) == len(whole) == 2 * EACH
    epochs, indices = np.zeros(2 * EACH, int), np.arange(2 * EACH)
    for _ in range(2):  # what has been found before changes nothing
        found, labels = train.read(epochs, indices)
        wanted, wanted_labels = whole.read(epochs, indices)
        replaced = {7: 8, EACH + 12: EACH + 14, EACH + 13: EACH + 14}
        intact = [i for i in indices if i not in replaced]
        assert torch.equal(found[intact], wanted[intact])
        assert labels.tolist() == wanted_labels.tolist()
        for index, other in replaced.items():
            assert not torch.equal(found[index], wanted[index])
            if side == 80:  # cropped with the draws of the sample that it replaces
                source = image_decode.decode(whole.rows, other)
                draws = images.seed.uniform(0, images.seed.AUGMENT, 0, index, np.arange(5))
                assert torch.equal(found[index], images.augment.crop_resized(source, 80, draws[:4]))
            else:
                assert torch.equal(train.pixels[index], whole.pixels[other])
    said = "".join(capsys.readouterr())
    for name in BROKEN:
        assert said.count(f"{NOTE}--data: {tmp_path}/broken/{name} is not a readable image") == 1
    for _ in range(2):
        assert validation.metrics({"loss": 1.0}) == {"loss": 1.0}
    total = f"{NOTE}3 of the 60 training images could not be decoded so far, and others took their places: "
    assert capsys.readouterr().out.count(total + f"{tmp_path}/broken/{BROKEN[0]}, ") == 1


@pytest.mark.parametrize("side", [8, 80], ids=["in memory", "large"])
def test_label_of_the_next_class(side: int, tmp_path: Path) -> None:
    """The last image of a class: pixels and label of the next one belong together."""
    train, _ = load(write_folder(tmp_path, side, (f"train/cat/{EACH - 1}.png", f"train/dog/{EACH - 1}.png")))
    _, labels = train.read(np.zeros(2, int), np.array([EACH - 1, 2 * EACH - 1]))
    assert labels.tolist() == [1, 0], "after the last image comes the first"


@pytest.mark.parametrize("side", [8, 80], ids=["in memory", "large"])
def test_too_many(side: int, tmp_path: Path) -> None:
    broken = tuple(f"train/cat/{i:02d}.png" for i in range(1, 5))  # 4 of 60
    root = write_folder(tmp_path, side, broken)
    told = r"--skip-unreadable: 4 of the 60 training images of --data .* and at most 5% may be skipped: repair or"
    with pytest.raises(UserError, match=told):
        load(root)[0].read(np.zeros(5, int), np.arange(5))


def test_nothing_is_left(tmp_path: Path) -> None:
    root = write_folder(tmp_path, 80, ("train/cat/00.png", "train/dog/00.png"), train_each=1)
    with pytest.raises(UserError, match="2 of the 2 training images"):
        load(root)


def test_disk_that_fails_is_not_skipped(tmp_path: Path) -> None:
    """Another start may read the file: skipping it would make a run that cannot be repeated."""
    root = write_folder(tmp_path, 80, ())
    train, _ = load(root)
    (root / "train" / "cat" / "07.png").unlink()
    with pytest.raises(UserError, match=r"07\.png is not a readable image: .*No such file"):
        train.read(np.zeros(1, int), np.array([7]))


def test_without_the_flag_it_is_advised(tmp_path: Path) -> None:
    root = write_folder(tmp_path, 80, ("train/cat/05.png",))
    train, _ = images.load(str(root), 0, False)
    with pytest.raises(UserError, match=r"05\.png is not a readable image: .*--skip-unreadable, the next image takes"):
        train.read(np.zeros(1, int), np.array([5]))


def test_workers_share_what_they_find(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train, _ = load(write_folder(tmp_path, 80, BROKEN))
    assert train.unreadable is not None
    requests = [data.Request(np.zeros(20, int), np.arange(i, i + 20), 20, True) for i in (0, 20, 40, 0, 20, 40)]
    labels = torch.cat([batch.targets for batch in data.Loader(train, requests, 2, torch.device("cpu"))])
    assert labels.tolist() == 2 * ([0] * EACH + [1] * EACH)
    assert [i for i in range(60) if i in train.unreadable] == [7, EACH + 12, EACH + 13]
    assert "".join(capfd.readouterr()).count(NOTE) == 3


def test_same_training_on_any_number_of_ranks(tmp_path: Path) -> None:
    """And after a resume. Each rank names what it has found, and rank 0 counts all of them once."""
    root = write_folder(tmp_path / "data", 80, (*BROKEN, "validation/dog/02.png"))
    flags = ["--data", str(root), "--skip-unreadable", "--image-size", "8", "--model", "resnet6", "--dtype", "float64"]
    flags += ["--global-batch-size", "30", "--max-steps", "4", "--save-every", "2", "--sync-bn", "--log-every", "1"]
    printed = {}
    for name, size, more in (("1", 1, []), ("2", 2, []), ("parts", 2, ["--stop-after", "2"]), ("parts", 2, [])):
        where = ["--out", str(tmp_path), "--name", name]
        result = runner.run_recipe("ddp_resnet", size, *where, *flags, *more)
        assert result.ok, str(result)
        printed[name] = result.outputs
    losses = {name: runner.records(tmp_path / name, "train/loss") for name in printed}
    assert losses["2"] == pytest.approx(losses["1"], rel=1e-9)
    assert losses["parts"] == pytest.approx(losses["2"], rel=1e-12)
    for name in ("1", "2"):
        everything = "".join(printed[name])
        assert "3 of the 60 training images could not be decoded so far" in printed[name][0]
        assert everything.count("1 of the 8 validation images could not be decoded so far") == 1
        for image in BROKEN:
            assert f"{image} is not a readable image" in everything


def test_mutant_that_takes_another_image_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What depends on what was read before differs between batches."""
    train, _ = load(write_folder(tmp_path, 80, BROKEN))
    draws = iter(range(1000))
    real = image_decode.decode_or_next

    def any_one(rows: object, index: int, *args: object, **more: object) -> tuple[torch.Tensor, int]:
        return real(rows, next(draws) if index == 7 else index, *args, **(more | {"cell": None}))  # type: ignore[arg-type]

    monkeypatch.setattr(image_decode, "decode_or_next", any_one)
    once, again = (train.read(np.zeros(1, int), np.array([7]))[0] for _ in range(2))
    assert not torch.equal(once, again)
    assert unreadable.MOST < 1
