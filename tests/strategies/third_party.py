"""Optimizers in the style of packages outside torch: what they keep in groups, and what they mix.

Short, and true to their sources: the update of each paper, state and group keys as its package has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer


class ScheduleFree(Optimizer):
    """Schedule-free AdamW (Defazio et al. 2024): progress in its groups, and two modes."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.1,
        eps: float = 1e-8,
    ) -> None:
        kept = {"eps": eps, "k": 0, "train_mode": False, "weight_sum": 0.0, "lr_max": -1.0}
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay} | kept)

    @torch.no_grad()
    def _to(self, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train:
                beta = group["betas"][0]
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - beta if train else 1 - 1 / beta)
                group["train_mode"] = train

    def train(self) -> None:
        self._to(train=True)

    def eval(self) -> None:
        self._to(train=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise Exception("not in train mode when step is called")  # its class, too
            beta1, beta2 = group["betas"]
            k, lr = group["k"], group["lr"]
            group["scheduled_lr"] = lr  # a new key
            group["lr_max"] = max(lr, group["lr_max"])
            weight = group["lr_max"] ** 2
            group["weight_sum"] += weight
            part = weight / group["weight_sum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "z" not in state:
                    state["z"], state["exp_avg_sq"] = p.clone(), torch.zeros_like(p)
                square = state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                grad = p.grad.div_(square.div(1 - beta2 ** (k + 1)).sqrt_().add_(group["eps"]))
                grad.add_(p, alpha=group["weight_decay"])
                p.lerp_(state["z"], part).add_(grad, alpha=lr * (beta1 * (1 - part) - 1))
                state["z"].sub_(grad, alpha=lr)
            group["k"] = k + 1


class Lion(Optimizer):
    """Chen et al. 2023: the sign of an average. Its step takes one more argument."""

    def __init__(self, params: Any, lr: float = 1e-3, betas=(0.9, 0.99), weight_decay: float = 0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, factor: float = 1.0) -> None:
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"] * factor, group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(average.mul(beta1).add_(p.grad, alpha=1 - beta1).sign_(), alpha=-lr)
                average.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Prodigy(Optimizer):
    """Mishchenko and Defazio 2023: a step size `d`, in its groups, from sums over all elements."""

    def __init__(self, params: Any, lr: float = 1.0, betas=(0.9, 0.999), d0: float = 1e-2):
        kept = {"d": d0, "d0": d0, "d_numerator": 0.0}
        super().__init__(params, {"lr": lr, "betas": betas} | kept)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        first, total = self.param_groups[0], 0.0
        d, lr, (beta1, beta2) = first["d"], first["lr"], first["betas"]
        beta3 = math.sqrt(beta2)
        numerator = first["d_numerator"] * beta3
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        for p in params:
            state, grad = self.state[p], p.grad
            if not state:
                state["p0"] = p.detach().clone()
                for key in ("s", "exp_avg", "exp_avg_sq"):
                    state[key] = torch.zeros_like(p)
            away = torch.dot(grad.flatten(), (state["p0"] - p).flatten()).item()
            numerator += d / first["d0"] * d * lr * away
            state["exp_avg"].mul_(beta1).add_(grad, alpha=d * (1 - beta1))
            state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=d * d * (1 - beta2))
            state["s"].mul_(beta3).add_(grad, alpha=d / first["d0"] * d * lr)
            total += state["s"].abs().sum().item()
        new = max(d, numerator / total) if total else d
        for group in self.param_groups:
            group |= {"d": new, "d_numerator": numerator}
        for p in params:
            state = self.state[p]
            p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(d * 1e-8), value=-d * lr)


class ClipsWithin(torch.optim.SGD):
    """Clips the norm of all gradients, where it is large, in its own step."""

    def step(self, closure: Any = None) -> Any:
        clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 50.0)
        return super().step(closure)


class GlobalNorm(torch.optim.SGD):
    """SGD on a gradient of length 1: divides by the norm over all parameters."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        norm = torch.nn.utils.get_total_norm(
            [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        )
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / norm, alpha=group["lr"])
