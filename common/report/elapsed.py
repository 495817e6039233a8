"""How long a run trained until a step, and until it reached a target."""

import math

import numpy as np
import pandas as pd

from common.report.host_traffic import leaving_share
from common.report.prediction import predicted_step_ms
from common.report.runs import FinishedRun, RunError


def is_simulated(run: FinishedRun) -> bool:
    """Return whether one process trained all workers: then times are predicted."""
    return run.config["workers"]["kind"] == "simulated"


def seconds_until(run: FinishedRun, steps: pd.Series) -> np.ndarray:
    """Return the time until these steps, without evaluation; of simulated workers as the runtime model predicts it."""
    if is_simulated(run):
        return steps.to_numpy() * predicted_step_ms(run) / 1000
    taken = run.curve("train", "time_step_ms").dropna()
    ends = taken["step"].to_numpy()
    seconds = np.cumsum(taken["time_step_ms"] * np.diff(ends, prepend=0)) / 1000
    return np.interp(steps, [0, *ends], [0, *seconds])


def steps_to_target(run: FinishedRun) -> float:
    """Return the step of the first evaluation that reached the table's target, inf if none did."""
    if run.target is None:
        raise RunError(f"{run.folder}: its table has no target")
    rows = run.curve("validation", run.target.metric).dropna()
    reached = rows["step"][[run.target.reached_by(value) for value in rows[run.target.metric]]]
    return math.inf if reached.empty else float(reached.iloc[0])


def seconds_to_target(run: FinishedRun) -> float:
    """Return the time until then."""
    step = steps_to_target(run)
    return step if math.isinf(step) else float(seconds_until(run, pd.Series([step]))[0])


def megabytes_to_target(run: FinishedRun) -> float:
    """Return what one worker handed to the network until then, in 1e6 bytes."""
    step = steps_to_target(run)
    if math.isinf(step):
        return step
    sent = run.curve("train", "bytes_sent").dropna()
    return float(np.interp(step, [0, *sent["step"]], [0, *sent["bytes_sent"]])) / run.total("workers") / 1e6


def host_megabytes_to_target(run: FinishedRun) -> float:
    """Return what one host sent to others until then, in 1e6 bytes."""
    return megabytes_to_target(run) * leaving_share(run)
