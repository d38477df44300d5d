"""What the fork server of tests/harness/runner.py imports once for all ranks."""

import atexit
import gc

import accelerate  # noqa: F401
import datasets  # noqa: F401
import pyarrow.parquet  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.tensor.debug
import torch.utils.flop_counter
import torch.utils.tensorboard  # noqa: F401
import torchvision.transforms.v2.functional  # noqa: F401
import tyro  # noqa: F401
from common.run import cli, exits  # noqa: F401
from common.workloads import gpt, images, resnet, text  # noqa: F401

from tests.harness import runner, short_resnet  # noqa: F401

gc.freeze()  # the ranks' collectors need not go through all of this
atexit.register(gc.unfreeze)
