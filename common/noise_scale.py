"""The gradient noise scale (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1), from norms of gradients.

With |G|^2 the squared norm of the true gradient and tr(Sigma) the variance of one sample's, summed over parameters, the
mean gradient of b samples has E|g_b|^2 = |G|^2 + tr(Sigma)/b. So squared norms of batches of two sizes, at the same
weights, tell both; their ratio B = tr(Sigma) / |G|^2 is the batch, in samples, at which noise and signal are equal.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LENGTH = 20  # intervals between measurements, in which the weight of one falls by the factor e
KINDS = ("", "_preconditioned")  # endings of the names


def signal_and_noise(small_square: Tensor, big_square: Tensor, small: float, big: float) -> tuple[Tensor, Tensor]:
    """Return unbiased estimates of |G|^2 and tr(Sigma), of the shape of the squares.

    small_square: mean of |g|^2 over batches of `small` samples; big_square: of their mean gradient, over `big` samples
    """
    signal = (big * big_square - small * small_square) / (big - small)
    noise = (small_square - big_square) / (1 / small - 1 / big)
    return signal, noise


def smoothed(sums: Tensor, found: Tensor, intervals: float) -> Tensor:
    """Return the weighted sums of all that was found so far, [kinds, 2]; a kind that is not finite is left out.

    intervals: since what was found before; its weights fall by exp(-intervals / LENGTH)

    Signals and noises are summed with equal weights, so that the ratio of their sums needs no correction of a bias.
    """
    return torch.where(found.isfinite().all(1, keepdim=True), math.exp(-intervals / LENGTH) * sums + found, sums)


def noise_row(sums: Sequence[Sequence[float]], local: float, everyone: float) -> dict[str, float]:
    """Return the metrics of smoothed sums [kinds][signal, noise], of each kind that was measured.

    local, everyone: samples of one worker and of all in an update. NaN where an estimate that is divided by is not
    positive; ratios to the noise scale may be negative, as the estimate of |G|^2 may.
    """
    row: dict[str, float] = {}
    for ending, (signal, noise) in zip(KINDS, sums, strict=True):
        if signal == noise == 0:
            continue
        row[f"noise_scale{ending}"] = noise / signal if signal > 0 else math.nan
        row[f"local_over_noise{ending}"] = local * signal / noise if noise > 0 else math.nan
        row[f"global_over_noise{ending}"] = everyone * signal / noise if noise > 0 else math.nan
    return row
