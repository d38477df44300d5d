# ruff: noqa: E501 (a planted line stands on one line, as it does in the script)
"""Scripts for tools.judge: right ones of several kinds, and mistakes as texts that replace a line of them.

A mistake is (kind, script, changes, line): `line` is a text that stands, once, in the line that must be named.
"""

from dataclasses import dataclass

from tests.harness import taught

IMAGES = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Points(Dataset):
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        self.x, self.y = torch.randn(count, 1, 6, 6, generator=g), torch.randint(3, (count,), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).flatten(1))


def evaluate(model, loader, device):
    model.eval()
    sums = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y in loader:
            out = model(x.to(device))
            sums += torch.tensor([(out.argmax(1) == y.to(device)).sum(), len(y)], device=device)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    net = Net().to(device)
    model = DDP(net, device_ids=[local_rank] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * world, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cuda", enabled=cuda)
    train, test = Points(100, 0), Points(40, 1)
    sampler = DistributedSampler(train, world, rank)
    loader = DataLoader(train, 16, sampler=sampler, num_workers=2, pin_memory=cuda)
    held_out = DataLoader(test, 16, sampler=DistributedSampler(test, world, rank, shuffle=False))
    first = 0
    if os.path.exists("last.pt"):
        state = torch.load("last.pt", map_location="cpu", weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        scaler.load_state_dict(state["scaler"])
        first = state["epoch"]
    for epoch in range(first, first + 3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.float16, enabled=cuda):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        accuracy = evaluate(model, held_out, device)
        if rank == 0:
            print(f"epoch {epoch} loss {mean.item() / world:.4f} accuracy {accuracy:.3f}")
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            state |= {"scheduler": scheduler.state_dict(), "scaler": scaler.state_dict()}
            torch.save(state, "last.part")
            os.replace("last.part", "last.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

TOKENS = """
import contextlib
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES = 4
LENGTH = 12


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.mix = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 17)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens) + torch.tanh(self.mix(self.embed(tokens)))))


def batch(step, micro, rank, world):
    g = torch.Generator().manual_seed(1000 * step + 10 * micro * world + rank)
    tokens = torch.randint(17, (4, LENGTH + 1), generator=g)
    targets = tokens[:, 1:].clone()
    lengths = torch.randint(3, LENGTH, (4, 1), generator=g)
    targets[torch.arange(LENGTH) >= lengths] = -100
    return tokens[:, :-1], targets


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(5)
model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
for step in range(8):
    micro_batches = [batch(step, micro, rank, world) for micro in range(MICRO_BATCHES)]
    count = torch.tensor(sum((targets != -100).sum() for _, targets in micro_batches))
    dist.all_reduce(count)
    total = torch.zeros(())
    for i, (tokens, targets) in enumerate(micro_batches):
        last = i == MICRO_BATCHES - 1
        with contextlib.nullcontext() if last else model.no_sync():
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") * world / count
            loss.backward()
            total += loss.detach() / world
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    dist.all_reduce(total)
    if rank == 0:
        print(f"step {step} loss {total:.5f}")
dist.destroy_process_group()
"""

BY_HAND = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
for parameter in model.parameters():
    dist.broadcast(parameter.data, src=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
g = torch.Generator().manual_seed(7)
x = torch.randn(64, 5, generator=g)
y = x.sum(1, keepdim=True)
for step in range(6):
    mine = slice(8 * step + 4 * rank, 8 * step + 4 * rank + 4)
    loss = nn.functional.mse_loss(model(x[mine]), y[mine])
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
dist.destroy_process_group()
"""

SHARDED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 2))
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(6):
    g = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 6, generator=g)
    loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""

GAN = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
torch.manual_seed(0)
G = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).cuda(), device_ids=[local_rank])
D = DDP(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)).cuda(), device_ids=[local_rank])
of_g = torch.optim.Adam(G.parameters(), lr=1e-3)
of_d = torch.optim.Adam(D.parameters(), lr=1e-3)
torch.manual_seed(1 + dist.get_rank())
bce = nn.BCEWithLogitsLoss()
for step in range(6):
    real, noise = torch.randn(8, 3).cuda() + 1, torch.randn(8, 4, device="cuda")
    of_d.zero_grad()
    fake = G(noise)
    both = D(torch.cat([real, fake.detach()]))
    bce(both, torch.cat([torch.ones(8, 1), torch.zeros(8, 1)]).cuda()).backward()
    of_d.step()
    of_g.zero_grad()
    bce(D(fake), torch.ones(8, 1, device="cuda")).backward()
    of_g.step()
dist.destroy_process_group()
"""

ROLLOUTS = """
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Pole:
    def __init__(self, seed):
        self.draw = np.random.default_rng(seed)

    def reset(self):
        self.state = self.draw.uniform(-0.05, 0.05, 4)
        return self.state

    def step(self, action):
        self.state = 0.9 * self.state + (0.1 if action else -0.1)
        return self.state, float(1 - abs(self.state[0]))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
agent = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
learner = DDP(agent)
optimizer = torch.optim.Adam(learner.parameters(), lr=1e-3)
torch.manual_seed(100 + rank)
poles = [Pole(4 * rank + i) for i in range(4)]
observations = np.stack([pole.reset() for pole in poles])
for update in range(6):
    seen, taken, rewards = [], [], []
    for _ in range(5):
        with torch.no_grad():
            logits = agent(torch.tensor(observations, dtype=torch.float32))
        actions = torch.distributions.Categorical(logits=logits).sample()
        seen.append(observations)
        taken.append(actions)
        moves = [pole.step(action) for pole, action in zip(poles, actions)]
        observations = np.stack([state for state, _ in moves])
        rewards.append(torch.tensor([reward for _, reward in moves], dtype=torch.float32))
    states = torch.tensor(np.concatenate(seen), dtype=torch.float32)
    chosen = torch.log_softmax(learner(states), 1).gather(1, torch.cat(taken)[:, None])[:, 0]
    loss = -(chosen * torch.cat(rewards)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""

LOCAL = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(1 + rank)


def average():
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= world


for step in range(8):
    x = torch.randn(8, 6)
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 2:
        average()
average()
if rank == 0:
    torch.save(model.state_dict(), "local.pt")
dist.destroy_process_group()
"""

SCRIPTS = {
    "images": IMAGES,
    "tokens": TOKENS,
    "by hand": BY_HAND,
    "sharded": SHARDED,
    "gan": GAN,
    "rollouts": ROLLOUTS,
    "local": LOCAL,
    "taught": taught.SCRIPT,
}


@dataclass(frozen=True)
class Mistake:
    """One planted mistake."""

    kind: str
    script: str
    changes: tuple[tuple[str, str], ...]
    line: str
    name: str = ""

    @property
    def id(self) -> str:
        """Of its test."""
        return f"{self.kind}{f', {self.name}' if self.name else ''}"

    def text(self) -> str:
        """The script with the mistake."""
        text = SCRIPTS[self.script]
        for old, new in self.changes:
            assert text.count(old) == 1, (self.id, text.count(old), old)
            text = text.replace(old, new)
        return text

    def number(self) -> int:
        """The line that must be named."""
        found = [i for i, line in enumerate(self.text().splitlines(), 1) if self.line in line]
        assert len(found) == 1, (self.id, found)
        return found[0]


DDP_LINE = "    model = DDP(net, device_ids=[local_rank] if cuda else None)\n"
FULL = '{"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}'
SAVE = '            torch.save(state, "last.part")\n            os.replace("last.part", "last.pt")\n'
LOAD = 'torch.load("last.pt", map_location="cpu", weights_only=True)'
NO_SYNC = "        with contextlib.nullcontext() if last else model.no_sync():\n"
LOSS = 'F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") * world / count'
DDP_SAMPLER = "    sampler = DistributedSampler(train, world, rank)\n"
SAVED = 'average()\nif rank == 0:\n    torch.save(model.state_dict(), "local.pt")\n'
MISTAKES = (
    Mistake(
        "buffers not synchronised",
        "images",
        ((DDP_LINE, "    model = DDP(net, broadcast_buffers=False)\n"),),
        "broadcast_buffers=False",
    ),
    Mistake(
        "buffers not synchronised",
        "by hand",
        (("nn.Tanh()", "nn.BatchNorm1d(8)"),),
        "dist.all_reduce(parameter.grad)",
        "gradients by hand",
    ),
    Mistake(
        "samples depend on each other",
        "tokens",
        (("self.norm(self.embed(tokens) + ", "self.norm(self.embed(tokens) - self.embed(tokens).mean(0) + "),),
        "return self.head",
    ),
    Mistake(
        "host wait in each step",
        "images",
        (("            scaler.update()\n", "            scaler.update()\n            last = loss.item()\n"),),
        "last = loss.item()",
    ),
    Mistake(
        "host wait in each step",
        "gan",
        (("    of_g.step()\n", "    of_g.step()\n    torch.cuda.synchronize()\n"),),
        "synchronize()",
        "for all of the GPU",
    ),
    Mistake("environments with one seed", "rollouts", (("Pole(4 * rank + i)", "Pole(i)"),), "logits = agent"),
    Mistake(
        "environments with one seed",
        "rollouts",
        (("Pole(4 * rank + i)", "Pole(i)"), ("manual_seed(100 + rank)", "manual_seed(100)")),
        "logits = agent",
        "and one seed of actions",
    ),
    Mistake(
        "saved before the last average", "local", ((SAVED, SAVED.partition("\n")[2] + "average()\n"),), "torch.save"
    ),
    Mistake(
        "checkpoint lacks the random numbers",
        "images",
        (("self.head = nn.Linear(4 * 16, 3)", "self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(4 * 16, 3))"),),
        'torch.save(state, "last.part")',
    ),
    Mistake(
        "never wrapped",
        "images",
        ((DDP_LINE, "    model = nn.Sequential()\n    model.add_module('module', net)\n"),),
        "optimizer = torch.optim",
    ),
    Mistake(
        "never wrapped",
        "sharded",
        (("    fully_shard(layer)\n", "    pass\n"), ("fully_shard(model)\n", "")),
        "optimizer = torch",
        "of FSDP",
    ),
    Mistake(
        "around the wrapper",
        "images",
        (("F.cross_entropy(model(x), y)", "F.cross_entropy(model.module(x), y)"),),
        "model.module(x)",
    ),
    Mistake(
        "around the wrapper",
        "images",
        (("F.cross_entropy(model(x), y)", "F.cross_entropy(net(x), y)"),),
        "net(x), y",
        "by name",
    ),
    Mistake(
        "different initial weights",
        "by hand",
        (("    dist.broadcast(parameter.data, src=0)\n", "    pass\n"),),
        "optimizer = torch",
    ),
    Mistake(
        "never wrapped",
        "by hand",
        (
            ("        dist.all_reduce(parameter.grad)\n", ""),
            ("    dist.broadcast(parameter.data, src=0)\n", "    pass\n"),
        ),
        "optimizer = torch",
        "by hand",
    ),
    Mistake(
        "replicas differ",
        "by hand",
        (("dist.all_reduce(parameter.grad)", "dist.all_reduce(parameter.grad.clone())"),),
        "optimizer.step()",
    ),
    Mistake(
        "sum of gradients", "by hand", (("        parameter.grad /= world\n", ""),), "dist.all_reduce(parameter.grad)"
    ),
    Mistake(
        "clip of local gradients",
        "by hand",
        (
            ("    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", ""),
            ("    loss.backward()\n", "    loss.backward()\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"),
        ),
        "nn.utils.clip",
    ),
    Mistake(
        "shapes that broadcast", "by hand", (("y = x.sum(1, keepdim=True)", "y = x.sum(1)"),), "nn.functional.mse_loss"
    ),
    Mistake("nothing is sent", "tokens", ((NO_SYNC, "        with model.no_sync():\n"),), "loss.backward()"),
    Mistake(
        "sent in each micro-batch",
        "tokens",
        ((NO_SYNC, "        with contextlib.nullcontext():\n"),),
        "loss.backward()",
    ),
    Mistake(
        "gradients averaged twice",
        "images",
        (
            (
                "            scaler.unscale_(optimizer)\n",
                "            scaler.unscale_(optimizer)\n            for p in model.parameters():\n                dist.all_reduce(p.grad)\n",
            ),
        ),
        "dist.all_reduce(p.grad)",
    ),
    Mistake(
        "rank written down",
        "images",
        (
            (
                'dist.init_process_group("nccl" if cuda else "gloo")',
                'dist.init_process_group("nccl" if cuda else "gloo", rank=0, world_size=2)',
            ),
        ),
        "dist.init_process_group",
    ),
    Mistake(
        "optimizer of other parameters",
        "sharded",
        (
            ("optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)\n", ""),
            ("for layer in (", "optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)\nfor layer in ("),
        ),
        "optimizer = torch",
    ),
    Mistake(
        "parameters without optimizer",
        "images",
        (("SGD(model.parameters()", "SGD(net.head.parameters()"),),
        "optimizer = torch",
    ),
    Mistake(
        "parameters without gradient",
        "by hand",
        (
            (
                "model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))",
                "model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))\nmodel[0].spare = nn.Parameter(torch.zeros(3))",
            ),
            (
                "        dist.all_reduce(parameter.grad)\n        parameter.grad /= world\n",
                "        if parameter.grad is not None:\n            dist.all_reduce(parameter.grad)\n            parameter.grad /= world\n",
            ),
        ),
        "optimizer = torch",
    ),
    Mistake(
        "optimizer made again",
        "images",
        (
            (
                "        model.train()\n",
                "        model.train()\n        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)\n",
            ),
        ),
        "        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum",
    ),
    Mistake("no backward", "sharded", (("    loss.backward()\n", ""),), "optimizer.step()"),
    Mistake("zero_grad is missing", "sharded", (("    optimizer.zero_grad()\n", ""),), "optimizer.step()"),
    Mistake("zero_grad is missing", "gan", (("    of_d.zero_grad()\n", ""),), "of_d.step()", "of one of two"),
    Mistake(
        "zero_grad before the step",
        "tokens",
        (("    optimizer.step()\n    optimizer.zero_grad()\n", "    optimizer.zero_grad()\n    optimizer.step()\n"),),
        "optimizer.zero_grad()",
    ),
    Mistake("clip before unscale", "images", (("            scaler.unscale_(optimizer)\n", ""),), "clip_grad_norm_"),
    Mistake(
        "clip after the step",
        "tokens",
        (
            (
                "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    optimizer.step()\n",
                "    optimizer.step()\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
            ),
        ),
        "clip_grad_norm_",
    ),
    Mistake(
        "accumulation not divided",
        "tokens",
        ((LOSS, "F.cross_entropy(logits.flatten(0, 1), targets.flatten())"),),
        "loss.backward()",
    ),
    Mistake(
        "mean of means",
        "tokens",
        ((LOSS, "F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / MICRO_BATCHES"),),
        "loss = F.cross_entropy",
    ),
    Mistake(
        "schedule per micro-batch",
        "tokens",
        (
            ("    schedule.step()\n", ""),
            ("            loss.backward()\n", "            loss.backward()\n            schedule.step()\n"),
        ),
        "schedule.step()",
    ),
    Mistake(
        "schedule before the step",
        "tokens",
        (
            ("    schedule.step()\n", ""),
            ("    total = torch.zeros(())\n", "    total = torch.zeros(())\n    schedule.step()\n"),
        ),
        "schedule.step()",
    ),
    Mistake("schedule never stepped", "tokens", (("    schedule.step()\n", ""),), "schedule = torch"),
    Mistake(
        "rate scaled without batch",
        "images",
        (("DataLoader(train, 16,", "DataLoader(train, 16 // world,"),),
        "optimizer = torch",
    ),
    Mistake("rate scaled twice", "images", (("lr=0.05 * world", "lr=0.05 * world * world"),), "optimizer = torch"),
    Mistake("rate not scaled", "images", (("lr=0.05 * world", "lr=0.05"),), "optimizer = torch"),
    Mistake(
        "set_epoch is missing",
        "images",
        (
            ("        sampler.set_epoch(epoch)\n", ""),
            ("        for x, y in loader:\n            x, y", "        for x, y in loader:  # here\n            x, y"),
        ),
        "# here",
    ),
    Mistake(
        "same samples on all ranks",
        "images",
        (
            (
                DDP_SAMPLER,
                "    sampler = torch.utils.data.RandomSampler(train, generator=torch.Generator().manual_seed(1))\n    sampler.set_epoch = print\n",
            ),
        ),
        "loader = DataLoader(train",
    ),
    Mistake(
        "same samples on all ranks",
        "tokens",
        (("+ 10 * micro * world + rank)", "+ 10 * micro)"),),
        "logits = model(tokens)",
        "without a loader",
    ),
    Mistake(
        "samples lost",
        "images",
        ((DDP_SAMPLER, "    train = torch.utils.data.Subset(train, range(rank, len(train), world))\n" + DDP_SAMPLER),),
        "loader = DataLoader(train",
    ),
    Mistake(
        "samples twice",
        "images",
        (
            (
                DDP_SAMPLER,
                "    sampler = torch.utils.data.RandomSampler(train, generator=torch.Generator().manual_seed(rank))\n    sampler.set_epoch = print\n",
            ),
        ),
        "loader = DataLoader(train",
    ),
    Mistake("evaluation counts duplicates", "images", (("Points(40, 1)", "Points(41, 1)"),), "held_out = DataLoader"),
    Mistake(
        "same dropout",
        "images",
        (
            ("self.head(F.relu", "self.drop(F.relu"),
            (
                "        self.head = nn.Linear(4 * 16, 3)\n",
                "        self.head = nn.Linear(4 * 16, 3)\n        self.drop = nn.Sequential(nn.Dropout(0.2), self.head)\n",
            ),
        ),
        "torch.manual_seed(0)",
    ),
    Mistake(
        "same augmentation",
        "images",
        (("return self.x[i], self.y[i]", "return self.x[i] + 0.1 * torch.randn(1, 6, 6), self.y[i]"),),
        "torch.manual_seed(0)",
    ),
    Mistake(
        "batch statistics per rank", "images", (("DataLoader(train, 16,", "DataLoader(train, 4,"),), "model = DDP(net"
    ),
    Mistake(
        "not all ranks come",
        "images",
        (("        dist.all_reduce(mean)\n", "        if rank == 0:\n            dist.all_reduce(mean)\n"),),
        "dist.all_reduce(mean)",
    ),
    Mistake(
        "not all ranks come",
        "images",
        (("        dist.barrier()\n", "            dist.barrier()\n"),),
        "dist.barrier()",
        "barrier of rank 0",
    ),
    Mistake("local loss logged", "images", (("{mean.item() / world:.4f}", "{loss.item():.4f}"),), "print(f"),
    Mistake("group left open", "sharded", (("dist.destroy_process_group()\n", ""),), "dist.init_process_group"),
    Mistake("gloo between GPUs", "images", (('"nccl" if cuda else "gloo"', '"gloo"'),), "dist.init_process_group"),
    Mistake(
        "wrapped before moved",
        "images",
        (("net = Net().to(device)", "net = Net()"), (DDP_LINE, "    model = DDP(net)\n    model.to(device)\n")),
        "model = DDP(net)",
    ),
    Mistake(
        "rank as device",
        "images",
        (("torch.cuda.set_device(local_rank)", "torch.cuda.set_device(rank)"),),
        "torch.cuda.set_device(rank)",
    ),
    Mistake(
        "all on GPU 0",
        "images",
        (
            (
                '        torch.cuda.set_device(local_rank)\n    device = torch.device("cuda", local_rank)',
                '        pass\n    device = torch.device("cuda")',
            ),
        ),
        "net = Net().to(device)",
    ),
    Mistake(
        "no such device",
        "gan",
        (("torch.cuda.set_device(local_rank)", "torch.cuda.set_device(-1)"),),
        "torch.cuda.set_device(-1)",
    ),
    Mistake(
        "GPU without a question",
        "images",
        (("cuda = torch.cuda.is_available()", "cuda = True"),),
        "torch.cuda.set_device",
    ),
    Mistake("loaded onto GPU 0", "images", ((LOAD, 'torch.load("last.pt", weights_only=True)'),), "torch.load"),
    Mistake(
        "saved by all ranks",
        "images",
        (
            (
                SAVE,
                '        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "scaler": scaler.state_dict(), "epoch": epoch + 1}, "last.pt")\n',
            ),
        ),
        "torch.save",
    ),
    Mistake(
        "checkpoint lacks the optimizer",
        "images",
        (
            (', "optimizer": optimizer.state_dict()', ""),
            (
                '        optimizer.load_state_dict(state["optimizer"])\n',
                "        optimizer.state[next(model.parameters())]\n",
            ),
        ),
        "torch.save",
    ),
    Mistake(
        "checkpoint lacks the schedule",
        "images",
        (
            ('"scheduler": scheduler.state_dict(), ', ""),
            (
                '        scheduler.load_state_dict(state["scheduler"])\n',
                '        scheduler.last_epoch = state["epoch"]\n        optimizer.param_groups[0]["lr"] *= 1\n',
            ),
        ),
        "torch.save",
    ),
    Mistake(
        "checkpoint lacks the scaler",
        "images",
        ((', "scaler": scaler.state_dict()', ""), ('        scaler.load_state_dict(state["scaler"])\n', "")),
        "torch.save",
    ),
    Mistake(
        "names of the wrapper",
        "images",
        ((FULL, FULL.replace("model.module", "model")), ("model.module.load_state_dict", "model.load_state_dict")),
        "torch.save",
    ),
    Mistake("pickle is trusted", "images", (("weights_only=True", "weights_only=False"),), "torch.load"),
    Mistake("resume repeats an epoch", "images", (('"epoch": epoch + 1', '"epoch": epoch'),), "torch.load"),
    Mistake(
        "resume without optimizer state",
        "images",
        (('        optimizer.load_state_dict(state["optimizer"])\n', ""),),
        "torch.load",
    ),
    Mistake(
        "resume at another rate",
        "images",
        (
            ('        scheduler.load_state_dict(state["scheduler"])\n', ""),
            (
                '        optimizer.load_state_dict(state["optimizer"])\n',
                '        optimizer.load_state_dict(state["optimizer"])\n        optimizer.param_groups[0]["lr"] = 0.05 * world\n',
            ),
        ),
        "torch.load",
    ),
    Mistake(
        "uneven batches",
        "images",
        (
            (
                DDP_SAMPLER,
                "    train = torch.utils.data.Subset(train, range(60 if rank else 40))\n    sampler = torch.utils.data.RandomSampler(train)\n    sampler.set_epoch = len\n",
            ),
            ("        sampler.set_epoch(epoch)\n", ""),
        ),
        "loader = DataLoader(train",
    ),
    Mistake(
        "replicas as threads",
        "by hand",
        (("optimizer = torch", "model = nn.DataParallel(model)\noptimizer = torch"),),
        "model = nn.DataParallel(model)",
    ),
    *(Mistake(kind, "taught", changes, line, f"row {row} of the seeds") for row, kind, changes, line in taught.ROWS),
)
