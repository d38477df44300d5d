"""What all ranks of a check need, imported once in the process that starts them."""

import torch._dynamo  # what the first optimizer imports
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.nn.parallel
import torch.utils.data  # noqa: F401

from common.workloads import gpt, images, resnet, text  # noqa: F401
from tools.exercise import rank  # noqa: F401
