"""What the tests share.

What torch reads when it is imported is set here, before any module of this package imports it.
"""

import os

# As launch/torchrun.sh has it: a rank whose store ends may print a stack of C++, or not, as the threads happen to run.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
