"""One optimizer made of several: a class for each group of parameters.

torch.optim.Muon takes matrices only, so a model that is trained with it needs a second optimizer
for biases, norms and embeddings. As one optimizer the two have one `step`, `clip_grad_norm_`,
scheduler and checkpoint, and `parallelize` takes them at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

OptimizerClass = Callable[..., torch.optim.Optimizer]


class PerGroup(torch.optim.Optimizer):
    """Steps group i with an optimizer of class i; made by `per_group`."""

    classes: tuple[OptimizerClass, ...] = ()

    def __init__(self, params: Any, **options: Any) -> None:
        groups = list(params)
        given = len(groups) if groups and isinstance(groups[0], dict) else 1
        if given != len(self.classes):
            raise ValueError(
                f"{type(self).__name__} steps {len(self.classes)} groups, one with each class, and "
                f"got {given}. Fix: pass param_groups (to a plain optimizer, a list of dicts) with "
                "one group per class, in this order."
            )
        super().__init__(groups, {})
        pairs = zip(self.classes, self.param_groups, strict=True)
        self._parts = [kind([group], **options) for kind, group in pairs]
        self._link()

    def _link(self) -> None:
        """Give all parts the groups and the state of this optimizer: the same objects."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # load_state_dict: new groups and a new state
        self._link()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_parts"):
            raise ValueError(
                f"{type(self).__name__} has a class for each of its groups, and none for another. "
                "Fix: pass all groups when it is built."
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


def per_group(*classes: OptimizerClass) -> type[PerGroup]:
    """An optimizer class that steps group i of its parameters with `classes[i]`.

        def groups(gpt):
            matrices = [p for p in gpt.blocks.parameters() if p.ndim == 2]
            rest = [p for p in gpt.parameters() if all(p is not m for m in matrices)]
            return [{"params": matrices, "lr": 0.02}, {"params": rest, "lr": 3e-4}]

        muon_adamw = dz.per_group(torch.optim.Muon, torch.optim.AdamW)
        model, optimizer = dz.parallelize(gpt, muon_adamw, stage=2, param_groups=groups)

    Options that only one class has go into its group. At stages 1 and 2 the groups of Muon and
    Adafactor are owned by whole parameters (see `ownership`), the others are cut as usual.
    """
    names = [getattr(kind, "__name__", str(kind)) for kind in classes]
    return type("+".join(names), (PerGroup,), {"classes": classes})


def class_of_group(optimizer_class: OptimizerClass, index: int) -> OptimizerClass:
    """The class that steps group `index`."""
    classes = getattr(optimizer_class, "classes", ())
    return classes[index] if index < len(classes) else optimizer_class
