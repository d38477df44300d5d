"""What scripts import, for the process that their ranks are forks of: it costs seconds once."""

import torch._dynamo  # what the first optimizer imports
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.nn.parallel
import torch.utils.data  # noqa: F401
