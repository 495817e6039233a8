"""Whether the difference between two rows is more than the noise of their seeds."""

from collections.abc import Sequence

import numpy as np
from scipy.stats import ttest_ind


def welch(values: Sequence[float], baseline: Sequence[float]) -> float | None:
    """Return p of Welch's two-sided t-test; None with fewer than two values on a side, NaNs, or no spread at all."""
    if min(len(values), len(baseline)) < 2 or not np.isfinite([*values, *baseline]).all():
        return None
    if np.ptp(values) == np.ptp(baseline) == 0:
        return None
    return float(ttest_ind(values, baseline, equal_var=False).pvalue)
