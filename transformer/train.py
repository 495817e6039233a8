"""Train a Transformer to translate.

python -m transformer.train experiment=transformer/proxy
torchrun --nproc-per-node 4 --nnodes 4 ... -m transformer.train experiment=table2/accumadam_aer
"""

from common.launch.cli import main

if __name__ == "__main__":
    main("transformer")
