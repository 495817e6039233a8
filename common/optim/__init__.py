"""Optimizers, learning-rate schedules and parameter groups of the two papers."""

from common.optim.accum_adam import AccumAdam, AccumAdamW
from common.optim.functional import Hyper, accum_adam_update
from common.optim.groups import NORM_TYPES, decay_groups
from common.optim.momentum import DmSGD, QGDmSGD
from common.optim.muon import MuonAdamW, hidden_matrices
from common.optim.schedules import constant_with_warmup, cosine_with_warmup, inverse_square_root, multistep_with_warmup

__all__ = [
    "NORM_TYPES",
    "AccumAdam",
    "AccumAdamW",
    "DmSGD",
    "Hyper",
    "MuonAdamW",
    "QGDmSGD",
    "accum_adam_update",
    "constant_with_warmup",
    "cosine_with_warmup",
    "decay_groups",
    "hidden_matrices",
    "inverse_square_root",
    "multistep_with_warmup",
]
