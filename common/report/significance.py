"""Is the difference between two rows more than the seeds' noise?"""

from collections.abc import Sequence

import numpy as np
from scipy.stats import ttest_ind


def welch(values: Sequence[float], baseline: Sequence[float]) -> float | None:
    """p of Welch's t-test, two-sided; None with fewer than two values on a side, NaNs, or no spread at all."""
    if min(len(values), len(baseline)) < 2 or not np.isfinite([*values, *baseline]).all():
        return None
    if np.ptp(values) == np.ptp(baseline) == 0:
        return None
    return float(ttest_ind(values, baseline, equal_var=False).pvalue)
