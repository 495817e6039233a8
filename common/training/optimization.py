"""Optimizer and schedule of a configuration."""

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from common import optim
from common.training.optimization_config import OptimizerConfig, ScheduleConfig


def build_optimizer(config: OptimizerConfig, lr: float, module: nn.Module) -> Optimizer:
    """Build the configured optimizer of the module's trainable parameters."""
    groups = optim.decay_groups(module, config.weight_decay, no_decay=config.no_decay)
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


def build_schedule(config: ScheduleConfig, optimizer: Optimizer, total_steps: int, steps_per_epoch: int) -> LRScheduler:
    """Build the configured learning-rate schedule, in units of committed updates."""
    unit = steps_per_epoch if config.unit == "epochs" else 1
    warmup = {"warmup_steps": round(config.warmup * unit), "warmup_start": config.warmup_start}
    match config.name:
        case "constant":
            return optim.constant_with_warmup(optimizer, **warmup)
        case "cosine":
            hold = steps_per_epoch if config.change == "epoch" else 1
            return optim.cosine_with_warmup(
                optimizer, total_steps, final_fraction=config.final_fraction, hold=hold, **warmup
            )
        case "inverse_square_root":
            return optim.inverse_square_root(optimizer, **warmup, first=config.first)
        case "multistep":
            milestones = [round(milestone * unit) for milestone in config.milestones]
            return optim.multistep_with_warmup(optimizer, milestones=milestones, gamma=config.gamma, **warmup)
