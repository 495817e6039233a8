"""Train an image classifier.

python -m cnn.train workers.count=4 topology=aer workers.per_host=2
torchrun --nproc-per-node 4 -m cnn.train parallel=allreduce optimizer=adam
"""

from common.launch.cli import main

if __name__ == "__main__":
    main("cnn")
