# ruff: noqa: E501 (a planted line stands on one line, as it does in the script)
"""A script of the kind that texts for beginners show, and what is wrong in them: a row of the seeds each.

Rows of seeds that are claims without a line of code (what DataParallel sends, who needs less memory) are on the page of
beliefs. A stopwatch around a wrapped model raises nothing and trains right: the judge does not look at times.
"""

SCRIPT = """
import argparse
import os
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()


def setup():
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    if use_cuda:
        torch.cuda.set_device(args.local_rank)
    return torch.device(f"cuda:{args.local_rank}" if use_cuda else "cpu")


def train():
    device = setup()
    rank = dist.get_rank()
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(64, 10), torch.randn(64, 1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = nn.Linear(10, 1).to(device)
    ddp_model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(ddp_model.parameters(), lr=0.001)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            outputs = ddp_model(inputs)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"Epoch {epoch}, Loss: {shown.item() / dist.get_world_size():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
"""

INIT = 'dist.init_process_group("nccl" if use_cuda else "gloo")'
WRAP = '    ddp_model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)\n'
OPTIMIZER = "    optimizer = torch.optim.Adam(ddp_model.parameters(), lr=0.001)\n"
LOOP = """            optimizer.zero_grad()
            outputs = ddp_model(inputs)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()
"""
AGAIN = "            optimizer = torch.optim.Adam(ddp_model.parameters(), lr=0.001)\n            outputs = ddp_model(inputs)\n            loss = criterion(outputs, labels)\n            optimizer.step()\n"
# Row of the seeds, kind, changes, line.
ROWS = (
    ("9", "GPU without a question", (("use_cuda = torch.cuda.is_available()", "use_cuda = True"),), "torch.cuda.set_device"),
    ("10", "rank written down", ((INIT, 'dist.init_process_group("gloo", rank=0, world_size=2)'),), "dist.init_process_group"),
    ("11", "gloo between GPUs", ((INIT, 'dist.init_process_group("gloo")'),), "dist.init_process_group"),
    ("12", "wrapped before moved", (("nn.Linear(10, 1).to(device)", "nn.Linear(10, 1)"), (WRAP, "    ddp_model = DDP(model)\n    ddp_model.to(device)\n")), "ddp_model = DDP(model)"),
    ("13", "rank as device", (('int(os.environ.get("LOCAL_RANK", 0))', 'int(os.environ.get("RANK", 0))'),), "torch.cuda.set_device"),
    ("14", "shapes that broadcast", (("torch.randn(64, 1))", "torch.randn(64))"),), "loss = criterion"),
    ("29", "never wrapped", ((WRAP, "    ddp_model = model\n"),), "optimizer = torch"),
    ("30", "local loss logged", (("{shown.item() / dist.get_world_size():.6f}", "{loss.item():.6f}"),), "print("),
    ("66", "no such device", (('default=int(os.environ.get("LOCAL_RANK", 0))', "default=-1"),), "torch.cuda.set_device"),
    ("69", "no backward", ((OPTIMIZER, ""), (LOOP, AGAIN)), "optimizer.step()"),
    ("69, again", "optimizer made again", ((OPTIMIZER, ""), (LOOP, AGAIN)), "optimizer = torch"),
)  # fmt: skip
