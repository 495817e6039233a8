"""Optimizers, learning-rate schedules and parameter groups of the two papers."""

from common.optim.accum_adam import AccumAdam, AccumAdamW
from common.optim.functional import Hyper
from common.optim.groups import NORM_TYPES, decay_groups
from common.optim.momentum import DmSGD, QGDmSGD
from common.optim.muon import MuonAdamW, hidden_matrices
from common.optim.schedules import Constant, Cosine, InverseSquareRoot, MultiStep

__all__ = [
    "NORM_TYPES",
    "AccumAdam",
    "AccumAdamW",
    "Constant",
    "Cosine",
    "DmSGD",
    "Hyper",
    "InverseSquareRoot",
    "MultiStep",
    "MuonAdamW",
    "QGDmSGD",
    "decay_groups",
    "hidden_matrices",
]
