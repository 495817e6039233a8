"""Label-smoothed cross-entropy over target tokens."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from transformer.model import PAD

SmoothedOver = Literal["wrong_tokens", "all_tokens"]


def cross_entropy(logits: Tensor, target: Tensor, smoothing: float, over: SmoothedOver = "wrong_tokens") -> Tensor:
    """Return the sum in nats over all tokens of target [B, T] but padding; logits [B, T, V].

    smoothing: the probability that the true token gives up
    over:      who shares it alike: the V - 1 other tokens (fairseq), or all V (PyTorch, and the paper's code)
    """
    vocabulary = logits.shape[-1]
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        target.flatten(),
        ignore_index=PAD,
        reduction="sum",
        label_smoothing=smoothing * vocabulary / (vocabulary - 1) if over == "wrong_tokens" else smoothing,
    )
