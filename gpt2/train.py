"""Train a GPT-2.

python -m gpt2.train experiment=gpt2/proxy                                   small, on the standard library's sources
torchrun --nnodes 4 --nproc-per-node 4 -m gpt2.train experiment=gpt2/accumadam_aer      as in the paper
"""

from common.launch.cli import main

if __name__ == "__main__":
    main("gpt2")
