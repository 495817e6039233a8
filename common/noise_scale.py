"""The gradient noise scale (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1), from norms of gradients.

Let |G|^2 be the squared norm of the true gradient and tr(Sigma) the variance of one sample's gradient, summed over
parameters. The mean gradient of b samples has E|g_b|^2 = |G|^2 + tr(Sigma)/b, so squared norms for two batch sizes, at
the same weights, give both. B = tr(Sigma) / |G|^2 is the batch size, in samples, at which noise and signal are equal.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LENGTH = 20  # intervals between measurements after which a measurement's weight has fallen by a factor of e
KINDS = ("", "_preconditioned")  # suffixes of the metrics' names


def signal_and_noise(small_square: Tensor, big_square: Tensor, small: float, big: float) -> tuple[Tensor, Tensor]:
    """Return unbiased estimates of |G|^2 and tr(Sigma), with the shape of the squares.

    small_square: mean of |g|^2 over batches of `small` samples; big_square: |g|^2 of their mean, over `big` samples
    """
    signal = (big * big_square - small * small_square) / (big - small)
    noise = (small_square - big_square) / (1 / small - 1 / big)
    return signal, noise


def smoothed(sums: Tensor, found: Tensor, intervals: float) -> Tensor:
    """Return the weighted sums of all measurements so far, [kinds, 2]; a kind that is not finite keeps its sums.

    intervals: number since the last measurement; earlier weights fall by a factor of exp(-intervals / LENGTH)

    Signals and noises are summed with equal weights, so that the ratio of their sums needs no bias correction.
    """
    return torch.where(found.isfinite().all(1, keepdim=True), math.exp(-intervals / LENGTH) * sums + found, sums)


def noise_row(sums: Sequence[Sequence[float]], local: float, everyone: float) -> dict[str, float]:
    """Return the metrics for smoothed sums [kinds][signal, noise], for each kind that was measured.

    local, everyone: samples per update, of one worker and of all workers. A metric is NaN if its divisor is not
    positive; ratios to the noise scale may be negative, because the estimate of |G|^2 may be.
    """
    row: dict[str, float] = {}
    for ending, (signal, noise) in zip(KINDS, sums, strict=True):
        if signal == noise == 0:
            continue
        row[f"noise_scale{ending}"] = noise / signal if signal > 0 else math.nan
        row[f"local_over_noise{ending}"] = local * signal / noise if noise > 0 else math.nan
        row[f"global_over_noise{ending}"] = everyone * signal / noise if noise > 0 else math.nan
    return row
