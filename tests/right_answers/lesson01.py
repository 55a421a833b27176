"""Right answers to lesson 01 that look different from the solution."""

RIGHT = {
    "01.state_bytes": [
        (
            "element by element, shared weights by identity",
            """
def state_bytes(model, optimizer):
    held = {"parameters": 0, "gradients": 0, "optimizer": 0}
    seen = set()
    for module in model.modules():
        for p in module.parameters(recurse=False):
            if id(p) in seen:
                continue
            seen.add(id(p))
            held["parameters"] += p.numel() * p.element_size()
            if p.grad is not None:
                held["gradients"] += p.grad.numel() * p.grad.element_size()
    for state in optimizer.state_dict()["state"].values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                held["optimizer"] += value.numel() * value.element_size()
    return held
""",
        ),
        (
            "the sizes of the storages",
            """
def state_bytes(model, optimizer):
    def weigh(tensors):
        storages = {t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    kept = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            kept += [t for t in optimizer.state.get(p, {}).values() if torch.is_tensor(t)]
    return dict(
        parameters=weigh(model.state_dict().values()),
        gradients=weigh([p.grad for p in model.parameters() if p.grad is not None]),
        optimizer=weigh(kept),
    )
""",
        ),
    ],
    "01.accumulate": [
        (
            "sums first, one division at the end",
            """
def accumulate(model, loss_fn, x, y, micro_batch):
    for p in model.parameters():
        p.grad = None
    for start in range(0, len(x), micro_batch):
        part = slice(start, start + micro_batch)
        loss = loss_fn(model(x[part]), y[part])
        (loss * len(x[part])).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.grad /= len(x)
""",
        ),
        (
            "autograd.grad, and parts as equal as can be",
            """
def accumulate(model, loss_fn, x, y, micro_batch):
    parameters = list(model.parameters())
    totals = [torch.zeros_like(p) for p in parameters]
    count = -(-len(x) // micro_batch)
    for a, b in zip(x.tensor_split(count), y.tensor_split(count)):
        gradients = torch.autograd.grad(loss_fn(model(a), b), parameters)
        for total, gradient in zip(totals, gradients):
            total.add_(gradient, alpha=len(a) / len(x))
    for p, total in zip(parameters, totals):
        p.grad = total
""",
        ),
    ],
    "01.scaled_step": [
        (
            "looks before it unscales, and returns a tensor",
            """
def scaled_step(parameters, optimizer, scaler):
    flat = torch.cat([p.grad.reshape(-1) for p in parameters])
    bad = torch.isnan(flat).any() | torch.isinf(flat).any()
    if bad:
        scaler["good_steps"] = 0
        scaler["scale"] = scaler["scale"] * 0.5
        optimizer.zero_grad(set_to_none=True)
        return ~bad
    for p in parameters:
        p.grad = p.grad * (1.0 / scaler["scale"])
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    scaler["good_steps"] += 1
    if scaler["good_steps"] % scaler["interval"] == 0:
        scaler.update(scale=scaler["scale"] * 2, good_steps=0)
    return ~bad
""",
        ),
        (
            "a sum that no inf or nan survives",
            """
import math


def scaled_step(parameters, optimizer, scaler):
    total = sum(p.grad.abs().sum().item() for p in parameters)
    step = math.isfinite(total)
    if not step:
        scaler["scale"], scaler["good_steps"] = scaler["scale"] / 2, 0
    else:
        torch._foreach_div_([p.grad for p in parameters], scaler["scale"])
        optimizer.step()
        good = scaler["good_steps"] + 1
        grow = good >= scaler["interval"]
        scaler["scale"] *= 2 if grow else 1
        scaler["good_steps"] = 0 if grow else good
    for p in parameters:
        p.grad = None
    return step
""",
        ),
    ],
}
