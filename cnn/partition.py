"""Dividing the training images among ranks whose data differs."""

import numpy as np
import torch
from torch import Tensor


def dirichlet_partition(labels: Tensor, ranks: int, alpha: float, seed: int) -> list[Tensor]:
    """Return the indices of each rank's images: disjoint sets of equal size, with fewer than `ranks` left over.

    Each rank's class distribution is drawn from Dirichlet(alpha) as in Hsu, Qi and Brown (arXiv 1909.06335): a large
    alpha gives every rank the same mixture, a small one a class or two each. When a class is used up, its weight goes
    to the others.

    labels [N] int64. The same arguments give the same partition. Raises ValueError if there are fewer images than
    ranks.
    """
    size = len(labels) // ranks
    if size == 0:
        raise ValueError(f"{len(labels)} images for {ranks} ranks: expected at least one for each")
    random = np.random.default_rng(seed)
    classes = int(labels.max()) + 1
    # Shuffled, so that popping from a pool is a random draw from its class.
    shuffled = random.permutation(len(labels))
    pools = [shuffled[labels.numpy()[shuffled] == c].tolist() for c in range(classes)]
    weights = random.dirichlet([alpha] * classes, ranks)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    # One image each in turn, so that no rank is left with the remainder.
    for _ in range(size):
        for rank, share in enumerate(shares):
            available = np.array([bool(pool) for pool in pools])
            odds = np.maximum(weights[rank], np.finfo(float).tiny) * available  # the tiny weight keeps odds positive
            share.append(pools[random.choice(classes, p=odds / odds.sum())].pop())
    return [torch.tensor(share) for share in shares]
