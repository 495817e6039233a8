"""How training images are divided among ranks that do not share them."""

import numpy as np
import torch
from torch import Tensor


def dirichlet_partition(labels: Tensor, ranks: int, alpha: float, seed: int) -> list[Tensor]:
    """Indices of each rank's own images: equally many for all, disjoint, fewer than `ranks` left over.

    The classes of a rank follow a distribution of its own, drawn from Dirichlet(alpha) as in Hsu, Qi and Brown
    (arXiv 1909.06335): a large alpha gives every rank the same mixture, a small one a class or two each. Where a
    class is used up its weight goes to the others.

    labels [N] int64; the same arguments give the same partition. Raises ValueError if there are fewer images than
    ranks.
    """
    size = len(labels) // ranks
    if size == 0:
        raise ValueError(f"{len(labels)} images for {ranks} ranks: expected at least one for each")
    random = np.random.default_rng(seed)
    classes = int(labels.max()) + 1
    # Shuffled, so that popping from a pool draws from its class at random.
    shuffled = random.permutation(len(labels))
    pools = [shuffled[labels.numpy()[shuffled] == c].tolist() for c in range(classes)]
    weights = random.dirichlet([alpha] * classes, ranks)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    # In turns, one image each, so that no rank is left with what the others did not want.
    for _ in range(size):
        for rank, share in enumerate(shares):
            available = np.array([bool(pool) for pool in pools])
            odds = np.maximum(weights[rank], np.finfo(float).tiny) * available  # of what is left, all may be unlikely
            share.append(pools[random.choice(classes, p=odds / odds.sum())].pop())
    return [torch.tensor(share) for share in shares]
