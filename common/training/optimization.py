"""Optimizer and schedule of a configuration."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from common import optim
from common.config.config import ConfigError
from common.config.optimization import MuonConfig, OptimizerConfig, ScheduleConfig


def build_optimizer(config: OptimizerConfig, lr: float, module: nn.Module) -> Optimizer:
    """Build the configured optimizer of the module's trainable parameters."""
    groups = optim.decay_groups(module, config.coupled_decay(lr), no_decay=config.no_decay)
    match config.name:
        case "sgd":
            return torch.optim.SGD(groups, lr, momentum=config.momentum, nesterov=config.nesterov)
        case "dmsgd":
            return optim.DmSGD(groups, lr, momentum=config.momentum, momentum_mixing=config.momentum_mixing)
        case "qg_dmsgd":
            return optim.QGDmSGD(
                groups, lr, momentum=config.momentum, tracking=config.tracking, nesterov=config.nesterov
            )
        case "adam" | "adamw":
            kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
            return kind(groups, lr, betas=config.betas, eps=config.eps, fused=config.fused or None)
        case "accumadam" | "accumadamw":
            kind = optim.AccumAdam if config.name == "accumadam" else optim.AccumAdamW
            return kind(
                groups,
                lr,
                betas=config.betas,
                eps=config.eps,
                accumulation_steps=config.accumulation_steps,
                fused=config.fused,
            )
        case "muon":
            return build_muon(config, lr, module, groups)


def build_muon(config: MuonConfig, lr: float, module: nn.Module, groups: list[dict[str, Any]]) -> Optimizer:
    """Build Muon for the hidden matrices in these groups and AdamW for the rest. Raises ConfigError if there are none.

    lr: Muon's learning rate; AdamW's is scaled to the batch by the same factor
    """
    hidden = optim.hidden_matrices(module)
    if not hidden:
        raise ConfigError(
            f"optimizer=muon with a {type(getattr(module, '_orig_mod', module)).__name__}: expected a model with "
            "matrices in lists of layers (nn.ModuleList), such as a transformer"
        )

    def only(wanted: bool, part_lr: float) -> list[dict[str, Any]]:
        decay = config.coupled_decay(part_lr)
        parts = [{**group, "params": [p for p in group["params"] if (p in hidden) == wanted]} for group in groups]
        return [{**part, "weight_decay": part["weight_decay"] and decay} for part in parts if part["params"]]

    adamw_lr = rate_of({"betas": config.betas}, config, lr)
    muon = torch.optim.Muon(
        only(True, lr), lr, momentum=config.momentum, nesterov=config.nesterov, adjust_lr_fn=config.adjust_lr
    )
    return optim.MuonAdamW(muon, torch.optim.AdamW(only(False, adamw_lr), adamw_lr, betas=config.betas, eps=config.eps))


def rate_of(group: Mapping[str, Any], config: OptimizerConfig, lr: float) -> float:
    """Return a parameter group's learning rate before the schedule; lr: of the optimizer, scaled to the batch."""
    own = config.adamw_lr if config.name == "muon" and "betas" in group else None  # of AdamW's part
    return lr if own is None else own * (lr / config.lr)


def build_schedule(config: ScheduleConfig, optimizer: Optimizer, total_steps: int, steps_per_epoch: int) -> LambdaLR:
    """Build the configured learning-rate schedule, in units of committed updates."""
    unit = steps_per_epoch if config.unit == "epochs" else 1
    warmup = {"warmup_steps": round(config.warmup * unit), "warmup_start": config.warmup_start}
    match config.name:
        case "constant":
            factor = optim.Constant(**warmup)
        case "cosine":
            hold = steps_per_epoch if config.change == "epoch" else 1
            final = config.final_fraction
            factor = optim.Cosine(total_steps=total_steps, final_fraction=final, hold=hold, **warmup)
        case "inverse_square_root":
            factor = optim.InverseSquareRoot(first=config.first, **warmup)
        case "multistep":
            milestones = tuple(round(milestone * unit) for milestone in config.milestones)
            factor = optim.MultiStep(milestones=milestones, gamma=config.gamma, **warmup)
    return LambdaLR(optimizer, factor)
