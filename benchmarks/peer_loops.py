"""One rank of benchmarks/peers.py: the same model, data, rates and batches in the loop of one library.

    torchrun --nproc-per-node 2 -m benchmarks.peer_loops LOOP WORKLOAD STEPS SEED FOLDER [FLAGS of the recipe]

Each loop is what the library's own examples show, in float32, and leaves in FOLDER what each of its ranks has measured.
"""

import contextlib
import hashlib
import json
import os
import resource
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import initial, schedule, session
from common.workloads import gpt, images, resnet, text
from tests.harness.runner import ROOT
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RECIPES = {"resnet": "ddp_resnet", "resnet32": "ddp_resnet", "gpt": "ddp_gpt"}
SIDE = {"resnet": 8, "resnet32": 32}  # of the digits, in pixels
BATCH = {"resnet": 128, "resnet32": 128, "gpt": 32}  # of all ranks, as the recipes have by default
WARMUP = {"resnet": 30, "resnet32": 30, "gpt": 20}
CLIP = {"resnet": 0.0, "resnet32": 0.0, "gpt": 1.0}
CPU = torch.device("cpu")


class Clock:
    """Notes the end of each step: by the wall, and of this process's processors."""

    def __init__(self) -> None:
        self.ticks: list[tuple[float, float]] = []

    def tick(self) -> None:
        """Note the end of one."""
        self.ticks.append((time.time(), time.process_time()))


# --- What all loops share ---------------------------------------------------------------------------------


class Task:
    """A model that returns its loss, data as tensors, an optimizer and its rates: the defaults of Brigade's recipe."""

    def __init__(self, workload: str, steps: int, seed: int) -> None:
        self.workload, self.steps, self.seed = workload, steps, seed
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.batch = BATCH[workload] // self.size
        self.clip = CLIP[workload]
        self.clock = Clock()
        torch.manual_seed(seed)
        if workload in SIDE:
            splits: Any = images.load("digits", seed, flip=False, image_size=SIDE[workload])
            train = splits[0]
            plain: nn.Module = resnet.make_resnet("resnet18", train.channels, len(train.class_names), train.size)
        else:
            splits = text.load("stdlib", 128)
            with torch.device("meta"):
                plain = gpt.GPT(gpt.Shape(splits[0].vocab_size, num_layers=4, num_heads=4, width=192, mlp_width=512))
            plain = initial.materialize(plain, seed, CPU, torch.float32)
        self.train, self.held_out = (_tensors(split) for split in splits)
        self.model = WithLoss(plain, workload)

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
        if self.workload in SIDE:
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-4)
        return torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def rates(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """Warm-up and half a cosine."""
        last, warm = self.steps - 1, WARMUP[self.workload]
        factor = lambda done: schedule.warmup_cosine(min(done, last), warm, self.steps)  # noqa: E731
        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _tensors(split: Any, most: int = 20_000) -> TensorDataset:
    """A split in memory; pixels scaled once for all, which spares these loops the work."""
    import numpy as np

    indices = np.arange(min(len(split), most))
    inputs, targets = split.read(np.zeros_like(indices), indices)
    return TensorDataset(inputs.float().div_(127.5).sub_(1) if inputs.dtype == torch.uint8 else inputs, targets)


class WithLoss(nn.Module):
    """Returns the mean loss as nanoGPT and Hugging Face's models do."""

    def __init__(self, plain: nn.Module, workload: str) -> None:
        super().__init__()
        self.plain, self.images = plain, workload in SIDE

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Loss, (), and for images logits, (b, num_classes)."""
        if not self.images:
            return {"loss": self.plain(inputs, labels).mean()}
        logits = self.plain(inputs)
        return {"loss": F.cross_entropy(logits, labels, label_smoothing=0.1), "logits": logits.detach()}


# --- The loops --------------------------------------------------------------------------------------------


def bare(task: Task) -> None:
    """PyTorch's own DDP tutorial."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(task.model)
    optimizer = task.optimizer(model.parameters())
    rates = task.rates(optimizer)
    for step, (inputs, labels) in enumerate(task.batches(task.loader())):
        loss = model(inputs, labels)["loss"]
        optimizer.zero_grad()
        loss.backward()
        if task.clip:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        rates.step()
        if step % 10 == 0 and task.rank == 0:
            print(step, loss.item())
        task.clock.tick()


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
        task.clock.tick()


def transformers(task: Task) -> None:
    """Hugging Face's Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ticks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            task.clock.tick()

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
            task.clock.tick()

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
        task.clock.tick()


ALONE = "no communication"
LOOPS: dict[str, Callable[[Task], None]] = {
    "bare DDP": bare,
    "Accelerate": accelerate,
    "transformers.Trainer": transformers,
    "Lightning": lightning,
}


def brigade(workload: str, steps: int, seed: int, out: str, flags: list[str]) -> dict[str, Any]:
    """The recipe, which evaluates and saves at its end; what it has noted."""
    clock, real = Clock(), session.Session.steps
    held: list[nn.Module] = []

    def ticking(run: session.Session, dp_rank: int) -> Iterator[int]:
        held[:] = [run._model]
        for step in real(run, dp_rank):
            yield step
            clock.tick()

    session.Session.steps = ticking  # type: ignore[method-assign,assignment]
    never = ("--eval-every", "1000000", "--save-every", "1000000")
    where = ("--out", out, "--name", "run", "--seed", str(seed), "--max-steps", str(steps))
    side = ("--image-size", str(SIDE[workload])) if workload in SIDE else ()
    sys.argv = [str(ROOT / "recipes" / RECIPES[workload] / "train.py"), *where, *never, *side, *flags]
    runpy.run_path(sys.argv[0], run_name="__main__")
    return {"ticks": clock.ticks, "model": held[0]}


# --- One rank ---------------------------------------------------------------------------------------------


@torch.no_grad()
def judge(model: nn.Module, task: Task) -> dict[str, float]:
    """Loss and top-1 accuracy on this rank's share of what was held out, added up over the ranks."""
    model.eval()
    mine = torch.utils.data.Subset(task.held_out, range(task.rank, len(task.held_out), task.size))
    sums = torch.zeros(3, dtype=torch.float64)
    for inputs, labels in DataLoader(mine, task.batch):
        found = model(inputs, labels)
        right = (found["logits"].argmax(1) == labels).sum() if "logits" in found else 0
        sums += torch.tensor([float(found["loss"]) * len(labels), float(right), len(labels)], dtype=torch.float64)
    dist.all_reduce(sums)
    return {"loss": float(sums[0] / sums[2]), "top1": float(sums[1] / sums[2])}


def digest(model: nn.Module) -> str:
    """Of all parameters: a loop whose ranks train apart is faster, and wrong."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    """Train once, and write what this rank has measured."""
    loop, workload, steps, seed, folder, *flags = sys.argv[1:]
    out = str(Path(folder, "runs"))
    if loop == "Brigade":
        found = brigade(workload, int(steps), int(seed), out, flags)
        ticks, model, judged = found["ticks"], found["model"], {}
    else:
        os.environ["PEER_OUT"] = out
        task = Task(workload, int(steps), int(seed))
        (LOOPS | {ALONE: alone})[loop](task)
        ticks, model, judged = task.clock.ticks, task.model, judge(task.model, task)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    facts = {"ticks": ticks, "digest": digest(model), "peak_mib": kilobytes / 1024, **judged}
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(facts))
    with contextlib.suppress(ValueError, AssertionError):  # no group is left of some
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
