"""What the fork server of tests/harness/runner.py imports once for all ranks."""

import atexit
import gc

import accelerate  # noqa: F401
import datasets  # noqa: F401
import PIL.Image
import pyarrow.parquet  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.pipelining
import torch.distributed.tensor.debug
import torch.utils.flop_counter
import torch.utils.tensorboard  # noqa: F401
import torchvision.transforms.v2.functional  # noqa: F401
import tyro
import tyro._backends._tyro_backend
import tyro._backends._tyro_help_formatting
from common import session
from common.run import cli, exits  # noqa: F401
from common.workloads import gpt, images, resnet, text  # noqa: F401

from tests.harness import runner, short_resnet  # noqa: F401

PIL.Image.init()  # its formats
tyro.cli(session.RunArgs, args=[])  # what its first call imports

gc.freeze()  # the ranks' collectors need not go through all of this
atexit.register(gc.unfreeze)
