"""Wrong answers to lesson 01 that people give, and the sentence that each must hear."""

from answers import Wrong
from answers.altered import altered

STATE = """
def state_bytes(model, optimizer):
    parameters = list(model.parameters())
    states = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    return {{
        "parameters": {parameters},
        "gradients": {gradients},
        "optimizer": {optimizer},
    }}
"""
RIGHT_STATE = {
    "parameters": "sum(p.nbytes for p in parameters)",
    "gradients": "sum(p.grad.nbytes for p in parameters if p.grad is not None)",
    "optimizer": "sum(t.nbytes for t in states)",
}


def state(**wrong):
    return STATE.format(**(RIGHT_STATE | wrong))


SCALED = """
def scaled_step(parameters, optimizer, scaler):
    {unscale}
    finite = {finite}
    if finite:
        optimizer.step()
        {good}
    else:
        {bad}
    optimizer.zero_grad()
    return finite
"""
RIGHT_SCALED = {
    "unscale": "[p.grad.div_(scaler['scale']) for p in parameters]",
    "finite": "all(bool(p.grad.isfinite().all()) for p in parameters)",
    "good": """scaler["good_steps"] += 1
        if scaler["good_steps"] == scaler["interval"]:
            scaler["scale"], scaler["good_steps"] = scaler["scale"] * 2, 0""",
    "bad": 'scaler["scale"], scaler["good_steps"] = scaler["scale"] / 2, 0',
}


def scaled(**wrong):
    return SCALED.format(**(RIGHT_SCALED | wrong))


def accumulate(body):
    return f"def accumulate(model, loss_fn, x, y, micro_batch):\n{body}"


PARTS = "    for a, b in zip(x.split(micro_batch), y.split(micro_batch)):\n"
DTYPE = ("another dtype",)
SHARED = ("tied weights and frozen layers",)
SHORT = ("a short last part: still those of the whole batch",)
MEMORY = ("never more than one part in memory",)
OVERFLOW = ("an overflow anywhere: no step at all",)

WRONG = {
    "01.state_bytes": [
        Wrong(
            "elements instead of bytes",
            state(parameters="sum(p.numel() for p in parameters)"),
            says="that is the number of elements",
        ),
        Wrong(
            "four bytes for each element",
            state(parameters="4 * sum(p.numel() for p in parameters)"),
            says="you took 4 bytes for each element",
            loses=DTYPE,
        ),
        Wrong(
            "a tied weight twice",
            state(parameters="sum(p.nbytes for m in model.modules() for p in m.parameters(False))"),
            says="you counted it twice",
            loses=SHARED,
        ),
        Wrong(
            "a gradient for each frozen parameter",
            state(gradients="sum(p.nbytes for p in parameters)"),
            says="you counted one for each parameter, but some parameters have none now",
            loses=SHARED,
        ),
        Wrong(
            "no step counters",
            state(optimizer="sum(t.nbytes for t in states if t.dim())"),
            says="you left out AdamW's step counters",
        ),
        Wrong(
            "eight bytes, whatever the optimizer",
            state(optimizer="2 * sum(p.nbytes for p in parameters)"),
            says="counted two numbers for each parameter. Look into this optimizer's state",
        ),
        Wrong(
            "a state before the first step",
            state(optimizer="sum(t.nbytes for t in states) or 8 * 100"),
            says="this optimizer has not taken a step yet, so it keeps nothing",
        ),
        Wrong(
            "buffers as well",
            state(parameters="sum(t.nbytes for t in model.state_dict().values())"),
            says="you counted the buffers too",
        ),
        Wrong(
            "only what is trained",
            state(parameters="sum(p.nbytes for p in parameters if p.requires_grad)"),
            says="a frozen parameter takes memory, too",
            loses=SHARED,
        ),
        Wrong(
            "a step, to see what the optimizer keeps",
            state() + "\n\nlook = state_bytes\n\n\ndef state_bytes(model, optimizer):\n"
            "    told = look(model, optimizer)\n    optimizer.step()\n    return told\n",
            says="The model or the optimizer has changed. Only read them",
        ),
        Wrong(
            "the first model's, for every model",
            state().replace("def state_bytes", "TOLD = {}\n\n\ndef look")
            + "\n\ndef state_bytes(model, optimizer):\n"
            "    return TOLD or TOLD.update(look(model, optimizer)) or TOLD\n",
            says="bytes are too",
        ),
        Wrong(
            "the total alone", "def state_bytes(model, optimizer):\n    return 1", "must be a dict"
        ),
    ],
    "01.accumulate": [
        Wrong(
            "a sum of means",
            accumulate(f"    model.zero_grad()\n{PARTS}        loss_fn(model(a), b).backward()"),
            says="the sum is too large",
        ),
        Wrong(
            "every part the same weight",
            accumulate(
                "    model.zero_grad()\n    parts = -(-len(x) // micro_batch)\n"
                f"{PARTS}        (loss_fn(model(a), b) / parts).backward()"
            ),
            says="every part got the same weight",
            loses=SHORT,
        ),
        Wrong(
            "every part weighs as if it were full",
            accumulate(
                "    model.zero_grad()\n"
                f"{PARTS}        (loss_fn(model(a), b) * micro_batch / len(x)).backward()"
            ),
            says="as if it were full",
            loses=SHORT,
        ),
        Wrong(
            "cleared between the parts",
            accumulate(
                f"{PARTS}        model.zero_grad()\n"
                "        (loss_fn(model(a), b) * len(a) / len(x)).backward()"
            ),
            says="only the last part is left",
        ),
        Wrong(
            "the last step's gradients kept",
            accumulate(f"{PARTS}        (loss_fn(model(a), b) * len(a) / len(x)).backward()"),
            says="the gradients of the previous step are still in the sum: clear them first",
        ),
        Wrong(
            "the short part left out",
            accumulate(
                "    model.zero_grad()\n    n = len(x) // micro_batch\n    for i in range(n):\n"
                "        part = slice(i * micro_batch, (i + 1) * micro_batch)\n"
                "        (loss_fn(model(x[part]), y[part]) / n).backward()"
            ),
            says="do not fill a part were left out",
            loses=SHORT,
        ),
        Wrong(
            "one backward at the end",
            accumulate(
                "    model.zero_grad()\n    loss = 0\n"
                f"{PARTS}        loss = loss + loss_fn(model(a), b) * len(a) / len(x)\n"
                "    loss.backward()"
            ),
            says="Call backward for each part",
            loses=MEMORY,
        ),
        Wrong(
            "the whole batch at once",
            accumulate("    model.zero_grad()\n    loss_fn(model(x), y).backward()"),
            says="samples at once; only",
            loses=MEMORY,
        ),
        Wrong(
            "all outputs are kept",
            accumulate(
                f"    model.zero_grad()\n    outputs = []\n{PARTS}"
                "        outputs.append(model(a))\n"
                "        loss = loss_fn(outputs[-1], b) * len(a) / len(x)\n"
                "        loss.backward(retain_graph=True)"
            ),
            says="were held at once besides the weights, but one part takes less than",
            loses=MEMORY,
        ),
        Wrong(
            "the losses keep their graphs, for a log",
            "LOG = []\n\n\n"
            + accumulate(
                f"    model.zero_grad()\n{PARTS}"
                "        LOG.append(loss_fn(model(a), b) * len(a) / len(x))\n"
                "        LOG[-1].backward(retain_graph=True)"
            ),
            says="were held at once besides the weights, but one part takes less than",
            loses=MEMORY,
        ),
        Wrong(
            "a step at the end",
            accumulate(
                f"    model.zero_grad()\n{PARTS}"
                "        (loss_fn(model(a), b) * len(a) / len(x)).backward()\n"
                "    torch.optim.SGD(model.parameters(), lr=0.1).step()"
            ),
            says="The weights have changed",
        ),
    ],
    "01.scaled_step": [
        Wrong("not unscaled", scaled(unscale="pass"), says="divided by the scale"),
        Wrong(
            "unscaled twice",
            scaled(unscale="[p.grad.div_(scaler['scale'] ** 2) for p in parameters]"),
            says="divided by the scale",
        ),
        Wrong(
            "stepped in spite of it",
            scaled(finite="True"),
            says="wrote inf or nan into the weights",
            loses=OVERFLOW,
        ),
        Wrong(
            "only inf is looked for",
            scaled(finite="not any(bool(p.grad.isinf().any()) for p in parameters)"),
            says="wrote inf or nan into the weights",
            loses=OVERFLOW,
        ),
        Wrong(
            "only the first tensor is looked at",
            scaled(finite="bool(parameters[0].grad.isfinite().all())"),
            says="wrote inf or nan into the weights",
            loses=OVERFLOW,
        ),
        Wrong(
            "the bad tensor alone is left out",
            """
def scaled_step(parameters, optimizer, scaler):
    finite = True
    for p in parameters:
        p.grad /= scaler["scale"]
        if not p.grad.isfinite().all():
            p.grad, finite = None, False
    optimizer.step()
    scaler["good_steps"] = scaler["good_steps"] + 1 if finite else 0
    scaler["scale"] *= 1 if finite else 0.5
    optimizer.zero_grad()
    return finite
""",
            says="changed some weights. If one gradient is bad, no weight may change",
            loses=OVERFLOW,
        ),
        Wrong(
            "the scale stays",
            scaled(bad='scaler["good_steps"] = 0'),
            says="must be half of what it was",
            loses=("an overflow halves the scale and ends the row",),
        ),
        Wrong(
            "an overflow does not end the row",
            scaled(bad='scaler["scale"] /= 2'),
            says="but 0 was expected: an overflow ends the row",
            loses=("an overflow halves the scale and ends the row",),
        ),
        Wrong(
            "the scale never grows",
            scaled(good='scaler["good_steps"] += 1'),
            says="good steps in a row were made",
            loses=("the scale grows after good steps in a row",),
        ),
        Wrong(
            "cleared after a good step alone",
            scaled().replace(
                "    optimizer.zero_grad()", "    if finite:\n        optimizer.zero_grad()"
            ),
            says="gradients are still there",
            loses=OVERFLOW,
        ),
        Wrong(
            "a row of its own instead of the scaler's",
            "good = 0\n"
            + scaled(
                good="""global good
        good += 1
        scaler["good_steps"] += 1
        if good == scaler["interval"]:
            scaler["scale"], scaler["good_steps"], good = scaler["scale"] * 2, 0, 0""",
                bad='scaler["scale"], scaler["good_steps"] = scaler["scale"] / 2, 0\n'
                "        globals()['good'] = 0",
            ),
            says="good steps in a row were made",
            loses=("the scale grows after good steps in a row",),
        ),
        Wrong(
            "looks at the gradients after the step",
            scaled()
            .replace("    finite =", "    optimizer.step()\n    finite =", 1)
            .replace("    if finite:\n        optimizer.step()\n", "    if finite:\n"),
            says="wrote inf or nan into the weights",
            loses=OVERFLOW,
        ),
        Wrong(
            "returns nothing",
            scaled().replace("return finite", "return None"),
            says="return True",
        ),
    ],
}

# ---- what the texts promise, as words of theirs -> (the criterion, the kind of case), or None

OPTIMIZERS = ("float32, several optimizers, before and after a step", "")
WHOLE = "equal parts: the gradients of the whole batch"
STEPS = ("finite gradients: unscaled, then stepped", "")
GROWS = ("the scale grows after good steps in a row", "growth")
PROMISES = {
    "01.state_bytes": {
        "return how many bytes their tensors take": OPTIMIZERS,
        "everything that the optimizer keeps, including its step counters": OPTIMIZERS,
        "the gradients that exist now": (*SHARED, "shared"),
        "right for any dtype and for all of torch's optimizers": (*DTYPE, "dtype"),
        "A weight that two layers share lies in memory once": (*SHARED, "shared"),
        "a frozen one has no gradient": (*SHARED, "shared"),
        "Buffers": OPTIMIZERS,
        "Leave the model and the optimizer unchanged": OPTIMIZERS,
        "before or after its first step": OPTIMIZERS,
    },
    "01.accumulate": {
        "memory holds the activations of `micro_batch` of them": (*MEMORY, "short"),
        "the gradient of `loss_fn` over the **whole** batch": (WHOLE, ""),
        "N need not be a multiple of `micro_batch`": (*SHORT, "short"),
        "they do not belong to this batch": (WHOLE, ""),
        "Do not update the weights": (WHOLE, ""),
        "the most samples that may go through the model at once": (*MEMORY, ""),
    },
    "01.scaled_step": {
        "divide the gradients by the scale and make the step": STEPS,
        "then **no** weight may change": (*OVERFLOW, "overflow"),
        "the scale is halved": ("an overflow halves the scale and ends the row", "overflow"),
        "it is doubled, and the count starts again at 0": GROWS,
        "An overflow sets it to 0": GROWS,
        "The gradients are cleared in both cases": (*OVERFLOW, "overflow"),
        "returns whether it was made": STEPS,
    },
}

# ---- mutants of the solution that are right ----

EQUIVALENT = {
    "01.accumulate": {
        "`zip(x.split(micro_batch), y.split(micro_batch), strict=True)` -> "
        "`zip(x.split(micro_batch), y.split(micro_batch))`": "x and y have as many samples",
        "`True` -> `False`": "the same",
    },
}

# ---- right answers that look different from the solution ----

RIGHT = {
    "01.state_bytes": [
        (
            "numpy adds up",
            """
import numpy as np


def state_bytes(model, optimizer):
    def weigh(tensors):
        return np.array([t.numel() * t.element_size() for t in tensors], dtype=np.int64).sum()

    parameters = list(dict.fromkeys(model.parameters()))
    kept = [state for p, state in optimizer.state.items()]
    return {
        "optimizer": weigh(t for s in kept for t in s.values() if isinstance(t, torch.Tensor)),
        "gradients": weigh(p.grad for p in parameters if p.grad is not None),
        "parameters": weigh(parameters),
    }
""",
        ),
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
        parameters=weigh(model.parameters()),
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
    total = sum((0 * p.grad).sum().item() for p in parameters)
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

# -- 01.largest_batch ------------------------------------------------------------------------------

PLAIN = ("measured at 2 and 4, plain SGD",)
STATEFUL = ("optimizers that keep states",)
ENOUGH = ("just enough, and not enough",)


def batch(*changes):
    return altered("01.largest_batch", *changes)


BYTES = '{"SGD": 0, "SGD with momentum": 4, "AdamW": 8}'
WRONG["01.largest_batch"] = [
    Wrong(
        "in proportion to the larger measurement",
        "def largest_batch(peaks, parameters, optimizer, budget):\n"
        "    return budget * max(peaks) // peaks[max(peaks)]",
        says="two measurements tell them apart",
        loses=PLAIN,
    ),
    Wrong(
        "what fits in the first step",
        batch((BYTES, '{"SGD": 0, "SGD with momentum": 0, "AdamW": 0}')),
        says="the first step fits, but the second one also holds the optimizer's states",
        loses=STATEFUL,
    ),
    Wrong(
        "AdamW with one state",
        batch((BYTES, '{"SGD": 0, "SGD with momentum": 4, "AdamW": 4}')),
        says="right for the states of SGD with momentum",
        loses=STATEFUL,
    ),
    Wrong(
        "sixteen bytes per parameter, as in the lesson's table",
        batch((BYTES, '{"SGD": 8, "SGD with momentum": 12, "AdamW": 16}')),
        says="in the measured peak already",
        loses=PLAIN,
    ),
    Wrong(
        "the batches are always 2 and 4",
        batch(("(at_n - at_m) // (n - m)", "(at_n - at_m) // 2"),
              ("at_m - m * sample", "at_m - 2 * sample")),
        says="it returned",
        loses=("measured at other batch sizes",),
    ),
    Wrong(
        "a power of two",
        batch(("return max(0, (budget - fixed) // sample)",
               "most = max(0, (budget - fixed) // sample)\n"
               "    return 1 << (most.bit_length() - 1) if most else 0")),
        says="a power of two",
        loses=PLAIN,
    ),
    Wrong(
        "rounded up",
        batch(("return max(0, (budget - fixed) // sample)",
               "return max(0, -(-(budget - fixed) // sample))")),
        says="which is too much",
        loses=PLAIN,
    ),
    Wrong(
        "a budget that must not be used up",
        batch(("(budget - fixed) // sample", "(budget - fixed - 1) // sample")),
        says="fit as well",
        loses=ENOUGH,
    ),
    Wrong(
        "less than nothing",
        batch(("max(0, (budget - fixed) // sample)", "(budget - fixed) // sample")),
        says="the answer is 0",
        loses=ENOUGH,
    ),
    Wrong(
        "a float",
        batch(("(budget - fixed) // sample", "(budget - fixed) / sample")),
        says="must be an int, not float",
        loses=PLAIN,
    ),
]  # fmt: skip
RIGHT["01.largest_batch"] = [
    (
        "counts up from nothing",
        """
def largest_batch(peaks, parameters, optimizer, budget):
    (a, x), (b, y) = peaks.items()
    per_sample = (x - y) / (a - b)
    states = {"AdamW": 2, "SGD with momentum": 1}.get(optimizer, 0) * 4 * parameters
    n = 0
    while x + per_sample * (n + 1 - a) + states <= budget:
        n += 1
    return n
""",
    ),
    (
        "an exact fraction, rounded down",
        """
from fractions import Fraction
from math import floor


def largest_batch(peaks, parameters, optimizer, budget):
    low, high = min(peaks), max(peaks)
    slope = Fraction(peaks[high] - peaks[low], high - low)
    if optimizer != "SGD":
        budget -= parameters * (8 if optimizer.startswith("Adam") else 4)
    return max(floor(high + (budget - peaks[high]) / slope), 0)
""",
    ),
]
PROMISES["01.largest_batch"] = {
    "with which **every** step of the run stays within `budget` bytes": (*STATEFUL, "states"),
    "With each you run only the **first** training step and write down its peak memory": None,
    "Every sample adds equally many bytes": (*PLAIN, ""),
    "gradients are freed after each step": None,
    "Assume that the peak occurs in backward in every step": None,
    "The first step and the later ones are not quite the same": (*STATEFUL, "states"),
    "the peak may be exactly this large": (*ENOUGH, "edge"),
}

# -- what authors who had not read the judge got away with -----------------------------------------

WRONG["01.scaled_step"] += [
    Wrong(
        "the sum is looked at, and may overflow",
        altered("01.scaled_step", ("p.grad.isfinite().all()", "p.grad.sum().isfinite()")),
        says="was skipped, although all its gradients were finite",
    ),
    Wrong(
        "the scale never falls below 1",
        altered(
            "01.scaled_step",
            ('scaler["scale"] /= 2', 'scaler["scale"] = max(1.0, scaler["scale"] / 2)'),
        ),
        says="must be half of what it was",
        loses=("an overflow halves the scale and ends the row",),
    ),
]
