"""What every test process would otherwise have to find out; imported once, by the server they are forked from."""

import contextlib

import torch
from torch._inductor import config

torch.set_num_threads(1)  # threads do not survive a fork, here and in the compiler
config.compile_threads = 1
with contextlib.suppress(Exception):  # without a C++ compiler only the tests of compiled code may fail
    torch.compile(torch.neg)(torch.zeros(8))  # asks compiler and processor what they support, which starts programs
