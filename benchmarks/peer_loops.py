"""One rank of benchmarks/peers.py: the same model, data, rates and batches in the loop of one library.

    torchrun --nproc-per-node 2 -m benchmarks.peer_loops LOOP WORKLOAD STEPS SEED FOLDER [FLAGS of the recipe]

Each loop is what the library's own examples show, in float32, one also in bfloat16. It leaves in FOLDER what each of
its ranks has measured.
"""

import contextlib
import functools
import hashlib
import json
import os
import resource
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from common import session
from common.train import initial, schedule
from common.workloads import gpt, images, resnet, text
from tests.harness.runner import ROOT
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


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
    """

    recipe: str
    steps: int
    metric: str
    goal: float
    batch: int
    warmup: int
    clip: float
    side: int


DIGITS = Workload("ddp_resnet", 101, "top1", 0.95, batch=128, warmup=10, clip=0.0, side=8)  # nine passes over them
WORKLOADS = {
    "resnet": DIGITS,
    "resnet32": DIGITS._replace(steps=31, goal=0.0, side=32),  # not quite three passes
    "gpt": Workload("ddp_gpt", 100, "loss", 2.25, batch=32, warmup=20, clip=1.0, side=0),
}
JUDGE_EVERY, JUDGED_SAMPLES = int(os.environ.get("PEER_JUDGE_EVERY", "0")), 512  # steps, 0 for never
CPU = torch.device("cpu")


class Clock:
    """Notes the end of each step, by the wall and of this process's processors, and now and then what was learned.

    Attributes:
        ticks: both times of each step's end, without those of judging.
        learned: after each `JUDGE_EVERY` steps.
        paused: both times of all judging.
    """

    def __init__(self, held_out: TensorDataset) -> None:
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


class Task:
    """A model that returns its loss, data as tensors, an optimizer and its rates: the defaults of Brigade's recipe."""

    def __init__(self, workload: str, steps: int, seed: int) -> None:
        self.what, self.steps, self.seed = WORKLOADS[workload], steps, seed
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.batch = self.what.batch // self.size
        self.clip = self.what.clip
        torch.manual_seed(seed)
        splits = load(self.what, seed)
        if self.what.side:
            train = splits[0]
            plain: nn.Module = resnet.make_resnet("resnet18", train.channels, len(train.class_names), train.size)
        else:
            with torch.device("meta"):
                plain = gpt.GPT(gpt.Shape(splits[0].vocab_size, num_layers=4, num_heads=4, width=192, mlp_width=512))
            plain = initial.materialize(plain, seed, CPU, torch.float32)
        self.train, self.held_out = (_tensors(split) for split in splits)
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
        last = self.steps - 1
        factor = lambda done: schedule.warmup_cosine(min(done, last), self.what.warmup, self.steps)  # noqa: E731
        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def load(what: Workload, seed: int) -> Any:
    """Training data, and what is held out."""
    if what.side:
        return images.load("digits", seed, flip=False, image_size=what.side)
    return text.load("stdlib", 128)


def _tensors(split: Any, most: int = 20_000) -> TensorDataset:
    """A split in memory; pixels scaled once for all, which spares these loops the work."""
    import numpy as np

    indices = np.arange(min(len(split), most))
    inputs, targets = split.read(np.zeros_like(indices), indices)
    return TensorDataset(inputs.float().div_(127.5).sub_(1) if inputs.dtype == torch.uint8 else inputs, targets)


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


def brigade(workload: str, steps: int, seed: int, out: str, flags: list[str]) -> dict[str, Any]:
    """The recipe, which evaluates and saves at its end; what it has noted."""
    real, what = session.Session.steps, WORKLOADS[workload]
    held: list[nn.Module] = []
    clocks: list[Clock] = []

    def ticking(run: session.Session, dp_rank: int) -> Iterator[int]:
        held[:] = [run._model]
        began = time.time(), time.process_time()
        clocks[:] = [Clock(_tensors(load(what, seed)[1]))]
        clocks[0].paused = (time.time() - began[0], time.process_time() - began[1])
        model = WithLoss(cast(nn.Module, run._model.module), what)
        for step in real(run, dp_rank):
            yield step
            clocks[0].tick(model)

    session.Session.steps = ticking  # type: ignore[method-assign,assignment]
    never = ("--eval-every", "1000000", "--save-every", "1000000")
    where = ("--out", out, "--name", "run", "--seed", str(seed), "--max-steps", str(steps))
    side = ("--image-size", str(what.side), "--model", "resnet18", "--lr", "0.2") if what.side else ()
    sys.argv = [str(ROOT / "recipes" / what.recipe / "train.py"), *where, *never, *side, *flags]
    runpy.run_path(sys.argv[0], run_name="__main__")
    return {"clock": clocks[0], "model": held[0]}


# --- One rank ---------------------------------------------------------------------------------------------


@torch.no_grad()
def judge(model: WithLoss, held_out: TensorDataset, most: int) -> dict[str, float]:
    """Loss and top-1 accuracy on what was held out, or its first samples, each rank with its share (all ranks)."""
    model.eval()
    mine = torch.utils.data.Subset(held_out, range(dist.get_rank(), min(most, len(held_out)), dist.get_world_size()))
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


def main() -> None:
    """Train once, and write what this rank has measured."""
    loop, workload, steps, seed, folder, *flags = sys.argv[1:]
    out = str(Path(folder, "runs"))
    if loop == "Brigade":
        found = brigade(workload, int(steps), int(seed), out, flags)
        clock, model, judged = found["clock"], found["model"], {}
    else:
        os.environ["PEER_OUT"] = out
        task = Task(workload, int(steps), int(seed))
        (LOOPS | {ALONE: alone})[loop](task)
        clock, model = task.clock, task.model
        judged = judge(task.model, task.held_out, len(task.held_out))
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    facts = {"digest": digest(model), "peak_mib": kilobytes / 1024, **judged}
    facts |= {"ticks": clock.ticks, "learned": clock.learned, "paused": clock.paused}
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(facts))
    with contextlib.suppress(ValueError, AssertionError):  # no group is left of some
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
