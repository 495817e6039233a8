"""Label-smoothed cross-entropy over target tokens."""

import torch.nn.functional as F
from torch import Tensor

from transformer.model import PAD


def cross_entropy(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Return the sum in nats over all tokens of target [B, T] but padding; logits [B, T, V].

    smoothing: eps in fairseq's convention, which spreads it over the V - 1 wrong tokens; PyTorch spreads it over all V
    """
    vocabulary = logits.shape[-1]
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        target.flatten(),
        ignore_index=PAD,
        reduction="sum",
        label_smoothing=smoothing * vocabulary / (vocabulary - 1),
    )
