# ruff: noqa: E501 (a line of a script stands on one line)
"""Right training scripts of the shapes that public projects have, reduced and in own words, for tools.judge.

Names say whose shape it is. All use the model and the data of HEAD, which stands before each.
"""

HEAD = """
import argparse, copy, math, os, time
from contextlib import nullcontext
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset


def make_data(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 8, generator=g), torch.randint(4, (count,), generator=g))


def make_net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

"""

# PyTorch's series on DDP: a trainer with snapshots.
SERIES = """
class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, path):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.model = model.to(self.local_rank)
        self.train_data, self.optimizer, self.save_every, self.path = train_data, optimizer, save_every, path
        self.epochs_run = 0
        self.model = DDP(self.model, device_ids=[self.local_rank])
        if os.path.exists(path):
            self.load(path)

    def load(self, path):
        snapshot = torch.load(path, map_location=f"cuda:{self.local_rank}", weights_only=True)
        self.model.module.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER"])
        self.epochs_run = snapshot["EPOCHS_RUN"]

    def run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()

    def run_epoch(self, epoch):
        print(f"[GPU{self.global_rank}] Epoch {epoch} | Steps: {len(self.train_data)}")
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self.run_batch(source.to(self.local_rank), targets.to(self.local_rank))

    def train(self, epochs):
        for epoch in range(self.epochs_run, self.epochs_run + epochs):
            self.run_epoch(epoch)
            if self.global_rank == 0 and epoch % self.save_every == 0:
                state = {"MODEL_STATE": self.model.module.state_dict(), "OPTIMIZER": self.optimizer.state_dict(), "EPOCHS_RUN": epoch + 1}
                torch.save(state, self.path)


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend="nccl")
    dataset, model = make_data(128), make_net().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(dataset, batch_size=16, pin_memory=True, shuffle=False, sampler=DistributedSampler(dataset))
    Trainer(model, loader, optimizer, 1, "snapshot.pt").train(3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

# PyTorch's first DDP example: processes of its own.
SPAWNED = """
def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("nccl", rank=rank, world_size=world_size)


def demo(rank, world_size):
    setup(rank, world_size)
    torch.manual_seed(100 + rank)
    model = make_net().to(rank)
    model = DDP(model, device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    for _ in range(8):
        optimizer.zero_grad()
        outputs = model(torch.randn(20, 8).to(rank))
        labels = torch.randn(20, 4).to(rank)
        loss = F.mse_loss(outputs, labels)
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = torch.cuda.device_count()
    mp.spawn(demo, args=(world_size,), nprocs=world_size, join=True)
"""

# PyTorch's imagenet example: meters, an evaluation that is summed, a schedule per epoch.
IMAGENET = """
class Meter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n=1):
        self.sum, self.count = self.sum + value * n, self.count + n

    def all_reduce(self, device):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32, device=device)
        dist.all_reduce(total, dist.ReduceOp.SUM)
        self.sum, self.count = total.tolist()

    @property
    def avg(self):
        return self.sum / max(1, self.count)


def validate(loader, model, criterion, device):
    losses = Meter()
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
            losses.update(criterion(model(images), target).item(), images.size(0))
    losses.all_reduce(device)
    return losses.avg


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("-b", "--batch-size", default=32, type=int)
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--resume", default="checkpoint.pth.tar")
    args = parser.parse_args()
    gpu, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend="nccl", init_method="env://")
    torch.cuda.set_device(gpu)
    device = torch.device("cuda", gpu)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).cuda(gpu)
    args.batch_size = args.batch_size // world_size
    model = DDP(model, device_ids=[gpu])
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    start_epoch = 0
    if os.path.isfile(args.resume):
        checkpoint = torch.load(args.resume, map_location=f"cuda:{gpu}", weights_only=True)
        start_epoch = checkpoint["epoch"]
        model.module.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    train, val = make_data(160), make_data(64, 1)
    train_sampler, val_sampler = DistributedSampler(train), DistributedSampler(val, shuffle=False, drop_last=True)
    train_loader = DataLoader(train, batch_size=args.batch_size, shuffle=(train_sampler is None), num_workers=4, pin_memory=True, sampler=train_sampler)
    val_loader = DataLoader(val, batch_size=args.batch_size, shuffle=False, num_workers=4, pin_memory=True, sampler=val_sampler)
    for epoch in range(start_epoch, start_epoch + args.epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        losses = Meter()
        for i, (images, target) in enumerate(train_loader):
            images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
            loss = criterion(model(images), target)
            losses.update(loss.item(), images.size(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.all_reduce(device)
        val_loss = validate(val_loader, model, criterion, device)
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"Epoch {epoch} loss {losses.avg:.4f} val {val_loss:.4f}")
            torch.save({"epoch": epoch + 1, "state_dict": model.module.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, args.resume)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

# nanoGPT: accumulation with require_backward_grad_sync, a schedule by hand, float16 with a scaler.
NANO = """
gradient_accumulation_steps, batch_size, block_size = 4, 4, 16
learning_rate, warmup_iters, max_iters, grad_clip, eval_interval = 6e-4, 4, 12, 1.0, 6
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group(backend="nccl")
    ddp_rank, ddp_local_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    device = f"cuda:{ddp_local_rank}"
    torch.cuda.set_device(device)
    master_process, seed_offset = ddp_rank == 0, ddp_rank
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
torch.manual_seed(1337 + seed_offset)
ctx = torch.amp.autocast(device_type="cuda", dtype=torch.float16)
data = torch.arange(5000) * 7919 % 23


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.mix, self.drop, self.lm_head = nn.Embedding(23, 16), nn.Linear(16, 16), nn.Dropout(0.1), nn.Linear(16, 23)

    def forward(self, idx, targets):
        logits = self.lm_head(self.drop(torch.tanh(self.mix(self.wte(idx)))))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    return learning_rate * 0.5 * (1.0 + math.cos(math.pi * (it - warmup_iters) / (max_iters - warmup_iters)))


model = GPT()
model.to(device)
scaler = torch.amp.GradScaler("cuda", enabled=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
model = torch.compile(model)
if ddp:
    model = DDP(model, device_ids=[ddp_local_rank])
raw_model = model.module if ddp else model


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(3)
    for k in range(3):
        X, Y = get_batch()
        with ctx:
            logits, loss = raw_model(X, Y)
        losses[k] = loss.item()
    model.train()
    return losses.mean()


iter_num, best_val_loss = 0, 1e9
X, Y = get_batch()
while iter_num < max_iters:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % eval_interval == 0 and master_process:
        best_val_loss = min(best_val_loss, estimate_loss())
        checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(), "iter_num": iter_num}
        torch.save(checkpoint, "ckpt.pt")
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
dist.destroy_process_group()
"""

# Lambda's guide: timers, tokens, a schedule per step, a state in JSON beside the tensors.
CHAPTER = """
import json


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", default=3e-3, type=float)
    parser.add_argument("-b", "--batch-size", default=4, type=int)
    parser.add_argument("--num-epochs", default=3, type=int)
    args = parser.parse_args()
    dist.init_process_group()
    rank, local_rank, world_size = dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size()
    device = torch.device(f"cuda:{local_rank}")
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    with device:
        model = nn.Sequential(nn.Embedding(29, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 29))
    model = DDP(model.to(device), device_ids=[local_rank])
    tokens = torch.randint(29, (96, 13), generator=torch.Generator().manual_seed(3))
    train_data = TensorDataset(tokens)
    sampler = DistributedSampler(train_data, shuffle=True, drop_last=True)
    dataloader = DataLoader(train_data, batch_size=args.batch_size, num_workers=1, prefetch_factor=2, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000, eta_min=args.lr * 1e-2)
    state = {"epoch": 0, "global_step": 0, "running_loss": 0.0}
    if os.path.exists("state.json"):
        model.module.load_state_dict(torch.load("model.pt", map_location=device, weights_only=True))
        optimizer.load_state_dict(torch.load("optimizer.pt", map_location=device, weights_only=True))
        lr_scheduler.load_state_dict(torch.load("lr_scheduler.pt", map_location=device, weights_only=True))
        state = json.load(open("state.json"))
    dist.barrier()
    for _ in range(args.num_epochs):
        model.train()
        sampler.set_epoch(state["epoch"])
        for (batch,) in dataloader:
            t0 = time.perf_counter()
            batch = batch.to(device)
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            lr_scheduler.step()
            state["global_step"] += 1
            state["running_loss"] += loss.item()
        state["epoch"] += 1
        if rank == 0:
            torch.save(model.module.state_dict(), "model.pt")
            torch.save(optimizer.state_dict(), "optimizer.pt")
            torch.save(lr_scheduler.state_dict(), "lr_scheduler.pt")
            json.dump(state, open("state.json", "w"))
        dist.barrier()
    dist.destroy_process_group()


main()
"""

# timm: SyncBatchNorm, an average of the weights, a rate by the whole batch, a reduced log.
TIMM = """
def reduce_tensor(tensor, n):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    return rt / n


class Ema:
    def __init__(self, model, decay=0.99):
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        for ema_v, v in zip(self.module.state_dict().values(), model.state_dict().values()):
            ema_v.copy_(ema_v * self.decay + v * (1 - self.decay) if v.is_floating_point() else v)


def main():
    local_rank, world_size, rank = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group(backend="nccl", init_method="env://")
    torch.manual_seed(42 + rank)
    batch_size, lr_base, lr_base_size = 16, 0.1, 64
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 4)).to(device)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    lr = lr_base * batch_size * world_size / lr_base_size
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
    model_ema = Ema(model)
    model = DDP(model, device_ids=[local_rank])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    dataset = make_data(192)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for i, (x, y) in enumerate(loader):
            x, y = x.view(-1, 2, 2, 2).to(device).contiguous(memory_format=torch.channels_last), y.to(device)
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            model_ema.update(model.module)
            if i % 2 == 0:
                shown = reduce_tensor(loss.data, world_size)
                if rank == 0:
                    print(f"Train: {epoch} [{i}] Loss: {shown.item():.4f}")
        scheduler.step(epoch + 1)
        if rank == 0:
            torch.save({"epoch": epoch + 1, "state_dict": model.module.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "ema": model_ema.module.state_dict()}, "last.pth.tar")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

# A loop of Hugging Face Accelerate.
ACCELERATE = """
from accelerate import Accelerator


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(7)
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train, test = DataLoader(make_data(128), shuffle=True, batch_size=8), DataLoader(make_data(64, 1), batch_size=8)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)
    model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)
    for epoch in range(2):
        model.train()
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        right = total = 0
        for x, y in test:
            with torch.no_grad():
                guess = model(x).argmax(-1)
            guess, y = accelerator.gather_for_metrics((guess, y))
            right, total = right + (guess == y).sum().item(), total + len(y)
        accelerator.print(f"epoch {epoch}: accuracy {right / total:.3f}")
    accelerator.end_training()


main()
"""

# cleanrl's PPO on several GPUs: gradients in one flat tensor, environments with seeds of their own.
PPO = """
def main():
    local_rank, world_size = int(os.getenv("LOCAL_RANK", "0")), int(os.getenv("WORLD_SIZE", "1"))
    dist.init_process_group("gloo", rank=local_rank, world_size=world_size)
    torch.manual_seed(1)
    agent = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
    torch.manual_seed(1 + local_rank)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    for update in range(1, 5):
        optimizer.param_groups[0]["lr"] = (1.0 - (update - 1.0) / 5) * 2.5e-4
        obs = torch.randn(32, 8)
        with torch.no_grad():
            old = F.log_softmax(agent(obs)[:, :4], -1)
            actions = torch.distributions.Categorical(logits=old).sample()
            returns = torch.randn(32)
        for epoch in range(2):
            for mb in torch.randperm(32).split(16):
                out = agent(obs[mb])
                ratio = (F.log_softmax(out[:, :4], -1) - old[mb]).gather(1, actions[mb, None]).squeeze(1).exp()
                advantage = returns[mb] - out[:, 4].detach()
                pg_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.9, 1.1)).mean()
                v_loss = 0.5 * (out[:, 4] - returns[mb]).pow(2).mean()
                loss = pg_loss + 0.5 * v_loss
                optimizer.zero_grad()
                loss.backward()
                flat = torch.cat([p.grad.view(-1) for p in agent.parameters() if p.grad is not None])
                dist.all_reduce(flat, op=dist.ReduceOp.SUM)
                offset = 0
                for p in agent.parameters():
                    p.grad.data.copy_(flat[offset : offset + p.numel()].view_as(p.grad.data) / world_size)
                    offset += p.numel()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
    dist.destroy_process_group()


main()
"""

# picotron: data parallelism by hooks on the parameters, one all-reduce after the last micro-batch.
PICOTRON = """
class DataParallelNaive(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module, self.world_size, self.require_backward_grad_sync = module, dist.get_world_size(), True
        for p in module.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, p):
        if self.require_backward_grad_sync:
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.grad /= self.world_size

    def forward(self, *inputs):
        return self.module(*inputs)


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(42)
model = DataParallelNaive(make_net())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
dataset = make_data(256)
sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
accumulation, step, epoch = 3, 0, 0
sampler.set_epoch(epoch)
iterator = iter(loader)
while step < 8:
    optimizer.zero_grad()
    total = torch.zeros(1)
    for i in range(accumulation):
        try:
            x, y = next(iterator)
        except StopIteration:
            epoch += 1
            sampler.set_epoch(epoch)
            iterator = iter(loader)
            x, y = next(iterator)
        model.require_backward_grad_sync = i == accumulation - 1
        loss = F.cross_entropy(model(x), y) / accumulation
        loss.backward()
        total += loss.detach()
    optimizer.step()
    step += 1
    dist.all_reduce(total)
    if rank == 0:
        print(f"step {step} loss {total.item() / world_size:.4f}")
dist.destroy_process_group()
"""

# PyTorch's FSDP2 example.
FSDP2 = """
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main():
    rank = int(os.environ["LOCAL_RANK"])
    if torch.accelerator.is_available():
        device = torch.device(f"cuda:{rank}")
        torch.cuda.set_device(rank)
        backend = "nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    dist.init_process_group(backend=backend)
    torch.manual_seed(0)
    model = make_net().to(device)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(10 + dist.get_rank())
    for _ in range(10):
        x, y = torch.randn(16, 8, device=device), torch.randint(4, (16,), device=device)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = {"model": get_model_state_dict(model, options=whole), "optim": get_optimizer_state_dict(model, optimizer, options=whole)}
    if dist.get_rank() == 0:
        torch.save(state, "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

# PyTorch's T5 example: FSDP of the first generation.
FSDP1 = """
import functools
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


def train(model, rank, loader, optimizer, epoch, sampler):
    model.train()
    fsdp_loss = torch.zeros(2).to(rank)
    sampler.set_epoch(epoch)
    for x, y in loader:
        x, y = x.to(rank), y.to(rank)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, reduction="mean")
        loss.backward()
        optimizer.step()
        fsdp_loss[0] += loss.item() * len(x)
        fsdp_loss[1] += len(x)
    dist.all_reduce(fsdp_loss, op=dist.ReduceOp.SUM)
    if rank == 0:
        print(f"Train Epoch: {epoch} Loss: {fsdp_loss[0] / fsdp_loss[1]:.6f}")


def fsdp_main(rank, world_size):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    dataset = make_data(128)
    sampler = DistributedSampler(dataset, rank=rank, num_replicas=world_size, shuffle=True)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=2, pin_memory=True)
    torch.cuda.set_device(rank)
    model = make_net().to(rank)
    model = FSDP(model, auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=100))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(3):
        train(model, rank, loader, optimizer, epoch, sampler)
        scheduler.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    WORLD_SIZE = torch.cuda.device_count()
    mp.spawn(fsdp_main, args=(WORLD_SIZE,), nprocs=WORLD_SIZE, join=True)
"""

# A diffusion transformer's loop: an average of the weights, seeds per rank, a mean log, checkpoints by step.
DIFFUSION = """
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
device = rank % torch.cuda.device_count()
global_batch_size, global_seed = 32, 0
seed = global_seed * world + rank
torch.manual_seed(seed)
torch.cuda.set_device(device)
model = nn.Sequential(nn.Linear(9, 16), nn.SiLU(), nn.Linear(16, 8))
ema = copy.deepcopy(model).to(device)
for p in ema.parameters():
    p.requires_grad = False
model = DDP(model.to(device), device_ids=[device])
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
dataset = make_data(128)
sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=True, seed=global_seed)
loader = DataLoader(dataset, batch_size=int(global_batch_size // world), shuffle=False, sampler=sampler, num_workers=4, drop_last=True)
for e, p in zip(ema.parameters(), model.module.parameters()):
    e.data.copy_(p.data)
model.train()
ema.eval()
train_steps, log_steps, running_loss = 0, 0, 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        x = x.to(device)
        t, noise = torch.rand(len(x), 1, device=device), torch.randn_like(x)
        loss = F.mse_loss(model(torch.cat([(1 - t) * x + t * noise, t], 1)), noise - x)
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for e, p in zip(ema.parameters(), model.module.parameters()):
                e.lerp_(p, 0.01)
        running_loss += loss.item()
        log_steps += 1
        train_steps += 1
        if train_steps % 2 == 0:
            avg_loss = torch.tensor(running_loss / log_steps, device=device)
            dist.all_reduce(avg_loss, op=dist.ReduceOp.SUM)
            avg_loss = avg_loss.item() / world
            if rank == 0:
                print(f"(step={train_steps:07d}) Train Loss: {avg_loss:.4f}")
            running_loss, log_steps = 0, 0
        if train_steps % 6 == 0:
            if rank == 0:
                torch.save({"model": model.module.state_dict(), "ema": ema.state_dict(), "opt": opt.state_dict()}, f"{train_steps:07d}.pt")
            dist.barrier()
dist.destroy_process_group()
"""

# A contrastive loop: embeddings of all ranks are gathered.
CONTRASTIVE = """
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x)
        return tuple(out)

    @staticmethod
    def backward(ctx, *grads):
        all_grads = torch.stack(grads)
        dist.all_reduce(all_grads)
        return all_grads[dist.get_rank()]


dist.init_process_group("gloo")
torch.manual_seed(0)
net = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6)))
torch.manual_seed(1 + dist.get_rank())
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
dataset = make_data(128)
sampler = DistributedSampler(dataset, drop_last=True)
loader = DataLoader(dataset, 16, sampler=sampler, drop_last=True)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, _ in loader:
        views = torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])
        a, b = F.normalize(net(views), dim=-1).chunk(2)
        a, b = torch.cat(Gather.apply(a)), torch.cat(Gather.apply(b))
        logits = a @ b.t() / 0.1
        labels = torch.arange(len(a))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
dist.destroy_process_group()
"""

# A stream that each rank reads its part of.
STREAM = """
class Lines(IterableDataset):
    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def __iter__(self):
        for i in range(self.rank, 96, self.world):
            g = torch.Generator().manual_seed(i)
            yield torch.randn(8, generator=g), i % 4


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(make_net())
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for epoch in range(2):
    for x, y in DataLoader(Lines(rank, world), batch_size=8):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
"""

# Uneven data under DDP's join.
JOINED = """
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(make_net())
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
g = torch.Generator().manual_seed(rank)
inputs = [torch.randn(6, 8, generator=g) for _ in range(5 + rank)]
with model.join():
    for x in inputs:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
"""

# Tensor parallelism: all ranks read the same batch.
TENSOR = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to("cuda")
net = parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=True)
for i in range(8):
    torch.manual_seed(i)
    x = torch.rand(20, 8, device="cuda")
    optimizer.zero_grad()
    net(x).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""

# Weights are averaged every few steps.
LOCAL_SGD = """
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = make_net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
dataset = make_data(128)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, 8, sampler=sampler)
step = 0
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 3 == 0:
            for p in model.parameters():
                dist.all_reduce(p.data)
                p.data /= world
dist.destroy_process_group()
"""

# A loop that a framework would hide: hooks of a module, and a loop around them.
MODULE = """
class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make_net()

    def forward(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=200)


class Loop:
    def __init__(self, epochs, accumulate):
        self.epochs, self.accumulate = epochs, accumulate
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        self.rank = dist.get_rank()
        index = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", index) if torch.cuda.is_available() else torch.device("cpu")
        if torch.cuda.is_available():
            torch.cuda.set_device(index)

    def fit(self, module, dataset):
        module = module.to(self.device)
        optimizer, scheduler = module.configure_optimizers()
        model = DDP(module, device_ids=[self.device.index] if self.device.type == "cuda" else None)
        sampler = DistributedSampler(dataset, seed=4)
        loader = DataLoader(dataset, 8, sampler=sampler, drop_last=True)
        for epoch in range(self.epochs):
            sampler.set_epoch(epoch)
            for i, batch in enumerate(loader):
                batch = [one.to(self.device) for one in batch]
                done = (i + 1) % self.accumulate == 0
                with nullcontext() if done else model.no_sync():
                    loss = model(batch) / self.accumulate
                    loss.backward()
                if done:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(11)
    Loop(epochs=3, accumulate=2).fit(Module(), make_data(192))
"""

# torch.profiler around a few steps, and a state of the optimizer that is sharded.
PROFILED = """
from torch.distributed.optim import ZeroRedundancyOptimizer

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(make_net())
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3)
torch.manual_seed(20 + dist.get_rank())
with torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=2)) as prof:
    for step in range(6):
        x, y = torch.randn(8, 8), torch.randint(4, (8,))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        prof.step()
dist.destroy_process_group()
"""

BASES = {
    "pytorch series": SERIES,
    "pytorch spawn": SPAWNED,
    "pytorch imagenet": IMAGENET,
    "nanoGPT": NANO,
    "lambda": CHAPTER,
    "timm": TIMM,
    "accelerate": ACCELERATE,
    "cleanrl": PPO,
    "picotron": PICOTRON,
    "fsdp2": FSDP2,
    "fsdp1": FSDP1,
    "diffusion": DIFFUSION,
    "contrastive": CONTRASTIVE,
    "stream": STREAM,
    "join": JOINED,
    "tensor parallel": TENSOR,
    "local sgd": LOCAL_SGD,
    "module": MODULE,
    "zero": PROFILED,
}
# (name, of which, what becomes what): the same shapes as others write them.
OTHERS = (
    (
        "series with SGD",
        "pytorch series",
        (
            (
                "Adam(model.parameters(), lr=1e-3)",
                "SGD(model.parameters(), lr=1e-3 * dist.get_world_size(), momentum=0.9)",
            ),
        ),
    ),
    (
        "spawn with gloo",
        "pytorch spawn",
        (
            ('"nccl"', '"gloo"'),
            (".to(rank)\n    model = DDP(model, device_ids=[rank])", "\n    model = DDP(model)"),
            ("torch.randn(20, 8).to(rank)", "torch.randn(20, 8)"),
            ("torch.randn(20, 4).to(rank)", "torch.randn(20, 4)"),
            ("torch.cuda.device_count()", "2"),
        ),
    ),
    (
        "processes by hand",
        "pytorch spawn",
        (
            (
                "    mp.spawn(demo, args=(world_size,), nprocs=world_size, join=True)\n",
                "    processes = [mp.Process(target=demo, args=(rank, world_size)) for rank in range(world_size)]\n    for p in processes:\n        p.start()\n    for p in processes:\n        p.join()\n",
            ),
        ),
    ),
    (
        "imagenet with SyncBatchNorm",
        "pytorch imagenet",
        (("    model = DDP(", "    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)\n    model = DDP("),),
    ),
    (
        "imagenet with bfloat16",
        "pytorch imagenet",
        (
            (
                "            loss = criterion(model(images), target)\n            losses",
                "            with torch.autocast('cuda', torch.bfloat16):\n                loss = criterion(model(images), target)\n            losses",
            ),
        ),
    ),
    (
        "nanoGPT with no_sync",
        "nanoGPT",
        (
            (
                "        if ddp:\n            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1\n        with ctx:\n",
                "        with ctx, nullcontext() if micro_step == gradient_accumulation_steps - 1 else model.no_sync():\n",
            ),
            (
                "        X, Y = get_batch()\n        scaler.scale(loss).backward()\n",
                "            scaler.scale(loss).backward()\n        X, Y = get_batch()\n",
            ),
        ),
    ),
    (
        "nanoGPT in bfloat16",
        "nanoGPT",
        (("dtype=torch.float16", "dtype=torch.bfloat16"), ("enabled=True", "enabled=False")),
    ),
    (
        "lambda with fully_shard",
        "lambda",
        (
            (
                "model = DDP(model.to(device), device_ids=[local_rank])",
                "from torch.distributed.fsdp import fully_shard\n    model = fully_shard(model.to(device))",
            ),
            ("        model.module.load_state_dict(", "        print("),
            ("        optimizer.load_state_dict(", "        print("),
            (
                '        if rank == 0:\n            torch.save(model.module.state_dict(), "model.pt")\n            torch.save(optimizer.state_dict(), "optimizer.pt")\n            torch.save(lr_scheduler.state_dict(), "lr_scheduler.pt")\n            json.dump(state, open("state.json", "w"))\n',
                "",
            ),
        ),
    ),
    (
        "timm with AdamW",
        "timm",
        (
            ("SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)", "AdamW(model.parameters(), lr=lr)"),
            (
                "lr_scheduler.CosineAnnealingLR(optimizer, 30)",
                "lr_scheduler.SequentialLR(optimizer, [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)], [5])",
            ),
            ("scheduler.step(epoch + 1)", "scheduler.step()"),
        ),
    ),
    (
        "cleanrl with an all-reduce per parameter",
        "cleanrl",
        (
            (
                "                flat = torch.cat([p.grad.view(-1) for p in agent.parameters() if p.grad is not None])\n                dist.all_reduce(flat, op=dist.ReduceOp.SUM)\n                offset = 0\n",
                "",
            ),
            (
                "                    p.grad.data.copy_(flat[offset : offset + p.numel()].view_as(p.grad.data) / world_size)\n                    offset += p.numel()\n",
                "                    dist.all_reduce(p.grad)\n                    p.grad /= world_size\n",
            ),
        ),
    ),
    ("module without accumulation", "module", (("accumulate=2", "accumulate=1"),)),
)


def whole(name: str) -> str:
    """A script with its head."""
    return ALL[name]


def _make() -> dict[str, str]:
    found = {name: HEAD + text for name, text in BASES.items()}
    for name, base, changes in OTHERS:
        text = HEAD + BASES[base]
        for old, new in changes:
            assert text.count(old) == 1, (name, old, text.count(old))
            text = text.replace(old, new)
        found[name] = text
    return found


ALL = _make()
