"""What every test process would otherwise have to set; imported once, by the server they are forked from."""

import torch
from torch._inductor import config

torch.set_num_threads(1)  # threads do not survive a fork, here and in the compiler
config.compile_threads = 1
