"""What the recipes import, for the process that their ranks are forks of: it costs seconds once."""

import accelerate  # noqa: F401
import gymnasium  # noqa: F401
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel  # noqa: F401

import common.session
import common.workloads.gpt
import common.workloads.images
import common.workloads.resnet
import common.workloads.text  # noqa: F401
