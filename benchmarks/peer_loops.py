"""One rank of benchmarks/peers.py: the same model, data, rates and batches in the loop of one library.

    torchrun --nproc-per-node 2 -m benchmarks.peer_loops LOOP WORKLOAD STEPS SEED GIVEN FOLDER

Each loop is what the library's own examples show, in float32, one also in bfloat16. It reads its data and its start
weights from the folder GIVEN, and leaves in FOLDER what each of its ranks has measured. Of Brigade, this program
imports the models alone, so that its first step comes as early as a user's of that library.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from common.workloads import gpt, resnet
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


class Workload(NamedTuple):
    """What all loops train, with the defaults of Brigade's recipe.

    Attributes:
        recipe: Brigade's.
        steps: of a training.
        metric: what is learned, "top1" or "loss".
        goal: of it, on the first samples held out; 0 for none.
        batch: samples of a step, over all ranks.
        warmup: steps.
        clip: global gradient norm; 0 for never.
        side: of images, in pixels; 0 for text.
        flags: of the recipe, besides its defaults.
    """

    recipe: str
    steps: int
    metric: str
    goal: float
    batch: int
    warmup: int
    clip: float
    side: int
    flags: tuple[str, ...] = ()


RESNET18 = ("--model", "resnet18", "--lr", "0.2")
DIGITS = Workload("ddp_resnet", 101, "top1", 0.95, batch=128, warmup=10, clip=0.0, side=8, flags=RESNET18)  # 9 epochs
WORKLOADS = {
    "resnet": DIGITS,
    # Not quite three passes.
    "resnet32": DIGITS._replace(steps=31, goal=0.0, side=32, flags=(*RESNET18, "--image-size", "32")),
    "gpt": Workload("ddp_gpt", 100, "loss", 2.25, batch=32, warmup=20, clip=1.0, side=0),
}
JUDGE_EVERY, JUDGED_SAMPLES = int(os.environ.get("PEER_JUDGE_EVERY", "0")), 512  # steps, 0 for never
SEQ_LEN = 128
SHAPE = gpt.Shape(256, num_layers=4, num_heads=4, width=192, mlp_width=512)


class Clock:
    """Notes the end of each step, by the wall and of this process's processors, and now and then what was learned.

    Attributes:
        ticks: both times of each step's end, without those of judging.
        learned: after each `JUDGE_EVERY` steps.
        paused: both times of all judging.
    """

    def __init__(self, held_out: Dataset) -> None:
        self.ticks: list[tuple[float, float]] = []
        self.learned: list[dict[str, float]] = []
        self.paused = (0.0, 0.0)
        self._held_out = held_out

    def tick(self, model: "WithLoss") -> None:
        """Note the end of one (all ranks)."""
        wall, cpu = time.time(), time.process_time()
        self.ticks.append((wall - self.paused[0], cpu - self.paused[1]))
        if JUDGE_EVERY and len(self.ticks) % JUDGE_EVERY == 0:
            self.learned.append(judge(model, self._held_out, JUDGED_SAMPLES))
            self.paused = (self.paused[0] + time.time() - wall, self.paused[1] + time.process_time() - cpu)


# --- What all loops share ---------------------------------------------------------------------------------


class Digits(Dataset):
    """Images as torchvision's sets give them: one at a time, cropped at random for training, floats of -1 to 1.

    Args:
        given: the folder with `pixels_SPLIT.npy`, (N, C, H, W) uint8, and `labels_SPLIT.npy`, (N,) int64.
        split: "train" or "held_out".
    """

    def __init__(self, given: Path, split: str) -> None:
        from torchvision.transforms import v2  # 2 s of import, which text does not need

        self.pixels, self.labels = (
            torch.from_numpy(np.load(given / f"{what}_{split}.npy")) for what in ("pixels", "labels")
        )
        side = self.pixels.shape[-1]
        crop = [v2.RandomCrop(side, padding=max(1, side // 8))] if split == "train" else []
        scale = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.5])]
        self.transform = v2.Compose([*crop, *scale])

    def __len__(self) -> int:
        """Samples in the split."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """An image, (C, H, W), and its label, ()."""
        return self.transform(self.pixels[index]), self.labels[index]


class Windows(Dataset):
    """Sequences of a row of tokens in a memory map, as nanoGPT reads them.

    Args:
        given: the folder with `tokens_SPLIT.npy`, (num_tokens,) of an unsigned type.
        split: "train" or "held_out".
    """

    def __init__(self, given: Path, split: str) -> None:
        self.tokens = np.load(given / f"tokens_{split}.npy", mmap_mode="r")

    def __len__(self) -> int:
        """Sequences in the split."""
        return (len(self.tokens) - 1) // SEQ_LEN

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A sequence and the tokens that follow its own, (seq_len,) int64 each."""
        row = torch.from_numpy(self.tokens[index * SEQ_LEN : (index + 1) * SEQ_LEN + 1].astype(np.int64))
        return row[:-1], row[1:]


def read(what: Workload, given: Path, split: str) -> Any:
    """A split of a workload's data."""
    return Digits(given, split) if what.side else Windows(given, split)


def warmup_cosine(step: int, warmup: int, steps: int) -> float:
    """Factor on the rate in a step, from 0: linear warm-up, then half a cosine to zero."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


class Task:
    """A model that returns its loss, data, an optimizer and its rates: the defaults of Brigade's recipe."""

    def __init__(self, workload: str, steps: int, seed: int, given: Path) -> None:
        self.what, self.steps, self.seed = WORKLOADS[workload], steps, seed
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.batch = self.what.batch // self.size
        self.clip = self.what.clip
        torch.manual_seed(seed)
        self.train, self.held_out = (read(self.what, given, split) for split in ("train", "held_out"))
        plain: nn.Module = resnet.make_resnet("resnet18", 1, 10, self.what.side) if self.what.side else gpt.GPT(SHAPE)
        plain.load_state_dict(torch.load(given / "start.pt", weights_only=True))
        self.model = WithLoss(plain, self.what)
        self.clock = Clock(self.held_out)

    def loader(self) -> DataLoader:
        """This rank's batches, in an order of its own in each epoch."""
        sampler: DistributedSampler = DistributedSampler(self.train, self.size, self.rank, seed=self.seed)
        return DataLoader(self.train, self.batch, sampler=sampler, drop_last=True)

    def batches(self, loader: Any) -> Iterator[Any]:
        """As many as there are steps, over as many epochs as they need."""
        done = 0
        for epoch in range(self.steps):
            if isinstance(getattr(loader, "sampler", None), DistributedSampler):
                loader.sampler.set_epoch(epoch)
            for batch in loader:
                if done == self.steps:
                    return
                yield batch
                done += 1

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """As people write it, with torch's own choice of kernel."""
        if self.what.side:
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-4)
        return torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def rates(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """Warm-up and half a cosine."""
        factor = lambda done: warmup_cosine(min(done, self.steps - 1), self.what.warmup, self.steps)  # noqa: E731
        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class WithLoss(nn.Module):
    """Returns the mean loss as nanoGPT and Hugging Face's models do."""

    def __init__(self, plain: nn.Module, what: Workload) -> None:
        super().__init__()
        self.plain, self.images = plain, bool(what.side)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Loss, (), and for images logits, (b, num_classes)."""
        if not self.images:
            return {"loss": self.plain(inputs, labels).mean()}
        logits = self.plain(inputs)
        return {"loss": F.cross_entropy(logits, labels, label_smoothing=0.1), "logits": logits.detach()}


# --- The loops --------------------------------------------------------------------------------------------


def bare(task: Task, dtype: torch.dtype = torch.float32) -> None:
    """PyTorch's own DDP tutorial; in a half type, with autocast, as its recipe of mixed precision has it."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(task.model)
    optimizer = task.optimizer(model.parameters())
    rates = task.rates(optimizer)
    for step, (inputs, labels) in enumerate(task.batches(task.loader())):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = model(inputs, labels)["loss"]
        optimizer.zero_grad()
        loss.backward()
        if task.clip:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        rates.step()
        if step % 10 == 0 and task.rank == 0:
            print(step, loss.item())
        task.clock.tick(task.model)


def accelerate(task: Task) -> None:
    """Accelerate's examples."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = task.optimizer(task.model.parameters())
    plain_loader = DataLoader(task.train, task.batch, shuffle=True, drop_last=True)
    # Not the rates: Accelerate would take their step once for each process, as they were made for an unshared loader.
    rates = task.rates(optimizer)
    model, optimizer, loader = accelerator.prepare(task.model, optimizer, plain_loader)
    for step, (inputs, labels) in enumerate(task.batches(loader)):
        loss = model(inputs, labels)["loss"]
        accelerator.backward(loss)
        if task.clip:
            accelerator.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            accelerator.print(step, loss.item())
        task.clock.tick(task.model)


def transformers(task: Task) -> None:
    """Hugging Face's Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ticks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            task.clock.tick(task.model)

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        inputs, labels = zip(*samples, strict=True)
        return {"inputs": torch.stack(inputs), "labels": torch.stack(labels)}

    how = TrainingArguments(
        output_dir=os.environ["PEER_OUT"],
        per_device_train_batch_size=task.batch,
        max_steps=task.steps,
        max_grad_norm=task.clip,
        logging_steps=10,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        dataloader_drop_last=True,
        disable_tqdm=True,
        seed=task.seed,
    )
    optimizer = task.optimizer(task.model.parameters())
    trainer = Trainer(
        task.model,
        how,
        train_dataset=task.train,
        data_collator=collate,
        optimizers=(optimizer, task.rates(optimizer)),
        callbacks=[Ticks()],
    )
    trainer.train()


def lightning(task: Task) -> None:
    """Lightning's Trainer."""
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.model(*batch)["loss"]

        def configure_optimizers(self) -> Any:
            optimizer = task.optimizer(self.parameters())
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": task.rates(optimizer), "interval": "step"}}

    class Ticks(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            task.clock.tick(task.model)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=task.size,
        strategy="ddp",
        max_steps=task.steps,
        gradient_clip_val=task.clip or None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Ticks()],
    )
    trainer.fit(Module(), DataLoader(task.train, task.batch, shuffle=True, drop_last=True))


def alone(task: Task) -> None:
    """The bare loop without DDP: each rank trains a model of its own, which no library would want."""
    dist.init_process_group("gloo")
    optimizer = task.optimizer(task.model.parameters())
    rates = task.rates(optimizer)
    dist.barrier()  # so that all ranks compute at the same time
    for inputs, labels in task.batches(task.loader()):
        optimizer.zero_grad()
        task.model(inputs, labels)["loss"].backward()
        if task.clip:
            nn.utils.clip_grad_norm_(task.model.parameters(), task.clip)
        optimizer.step()
        rates.step()
        task.clock.tick(task.model)


ALONE = "no communication"
LOOPS: dict[str, Callable[[Task], None]] = {
    "bare DDP": bare,
    "bare DDP, bfloat16": functools.partial(bare, dtype=torch.bfloat16),
    "Accelerate": accelerate,
    "transformers.Trainer": transformers,
    "Lightning": lightning,
}


# --- One rank ---------------------------------------------------------------------------------------------


@torch.no_grad()
def judge(model: WithLoss, held_out: Any, most: int) -> dict[str, float]:
    """Loss and top-1 accuracy on what was held out, or its first samples, each rank with its share (all ranks)."""
    model.eval()
    mine = Subset(held_out, range(dist.get_rank(), min(most, len(held_out)), dist.get_world_size()))
    sums = torch.zeros(3, dtype=torch.float64)
    for inputs, labels in DataLoader(mine, 64):
        found = model(inputs, labels)
        right = (found["logits"].argmax(1) == labels).sum() if "logits" in found else 0
        sums += torch.tensor([float(found["loss"]) * len(labels), float(right), len(labels)], dtype=torch.float64)
    dist.all_reduce(sums)
    model.train()
    return {"loss": float(sums[0] / sums[2]), "top1": float(sums[1] / sums[2])}


def digest(model: nn.Module) -> str:
    """Of all parameters: a loop whose ranks train apart is faster, and wrong."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def leave(folder: str, model: nn.Module, clock: Clock, judged: dict[str, float]) -> None:
    """Write what this rank has measured."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    facts = {"digest": digest(model), "peak_mib": kilobytes / 1024, **judged}
    facts |= {"ticks": clock.ticks, "learned": clock.learned, "paused": clock.paused}
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(facts))


def main() -> None:
    """Train once."""
    loop, workload, steps, seed, given, folder = sys.argv[1:]
    os.environ["PEER_OUT"] = str(Path(folder, "runs"))
    task = Task(workload, int(steps), int(seed), Path(given))
    (LOOPS | {ALONE: alone})[loop](task)
    leave(folder, task.model.plain, task.clock, judge(task.model, task.held_out, len(task.held_out)))
    with contextlib.suppress(ValueError, AssertionError):  # no group is left of some
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
