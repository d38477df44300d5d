"""What the fork server of tests/ranks.py imports once for all ranks."""

import datasets  # noqa: F401
import pyarrow.parquet  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint
import torch.utils.flop_counter
import torch.utils.tensorboard  # noqa: F401
import torchvision.transforms.v2.functional  # noqa: F401
import tyro  # noqa: F401
