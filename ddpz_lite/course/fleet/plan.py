"""A planner: does a mesh fit a cluster, how long is its step, and which meshes are best?

    plan = Plan(tp=8, pp=4, dp=8)
    why_not(LLAMA_70B, h100(256), plan, batch=512)     None if it can run, else the reason
    memory(LLAMA_70B, plan, batch=512)                 bytes by kind on one GPU
    step_time(LLAMA_70B, h100(256), plan, batch=512)   seconds by cause
    search(LLAMA_70B, h100(256), batch=512)            the best plans that fit

All numbers are modelled. A matrix product takes the longer of its arithmetic and its bytes (a
roofline, Williams et al. 2009). A message takes latency + bytes / bandwidth (lesson 02b) on the
link that its group crosses. `Assumed` names what no data sheet says.

Units: bytes, seconds, FLOP/s, and bytes/s in one direction of one GPU. `batch` counts sequences of
all ranks in a step. GPUs are numbered along tp first, then cp, dp and pp, so a tensor group has
neighbours and stages are farthest apart; expert groups are made of ranks of the data axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from math import ceil, inf

from ddpz_lite.course.fleet.hardware import GPU, Cluster, Link
from ddpz_lite.course.fleet.models import Model
from ddpz_lite.strategies.costs import elements_moved, zero_memory

BF16 = 2  # bytes of an element that is computed with or sent


@dataclass(frozen=True)
class Plan:
    """A mesh and what belongs to it.

    stage: ZeRO over dp x cp. micro_batch: sequences that a pipeline stage takes at once. virtual:
    chunks of a stage (interleaving). recompute: "none", "selective" (attention's scores) or "full".
    sequence: sequence parallelism over tp. fused: attention stores no scores and skips masked ones.
    If tp exceeds the heads of keys and values, ranks hold copies of them, which are not counted.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    stage: int = 1
    micro_batch: int = 1
    recompute: str = "none"
    virtual: int = 1
    sequence: bool = True
    fused: bool = True

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    def micro_batches(self, batch: int) -> int:
        return batch // (self.dp * self.micro_batch)

    def __str__(self) -> str:
        axes = [f"{a}{getattr(self, a)}" for a in ("tp", "cp", "ep", "pp", "dp")]
        shown = [axis for axis in axes if not axis.endswith("p1")] or ["1 GPU"]
        shown += [f"ZeRO-{self.stage}", f"micro-batch {self.micro_batch}"]
        shown += [f"{self.virtual} chunks"] * (self.virtual > 1)
        return " ".join([*shown, f"recompute {self.recompute}"])


@dataclass(frozen=True)
class Assumed:
    """What no data sheet says, so it is assumed or fitted.

    matmul: attainable part of the peak in a large product; lesson 20b fits it to GPT-3 on 384 A100.
    link: attainable part of a bandwidth; DeepSeek-AI 2024, section 3.2.2, has 160 of 200 GB/s.
    hidden: part of the messages within layers and between stages that runs behind compute.
    behind: part of the compute behind which ZeRO's messages can run.
    usable: part of the memory; the rest is the runtime's and lost to fragments.
    """

    matmul: float = 0.63
    link: float = 0.8
    hidden: float = 0.0
    behind: float = 0.5
    usable: float = 0.9


@dataclass(frozen=True)
class Step:
    """Seconds of a step by cause. Messages count as far as they are exposed."""

    compute: float
    recompute: float
    tensor: float
    context: float
    expert: float
    stages: float
    bubble: float
    data: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def why_not(
    model: Model, cluster: Cluster, plan: Plan, batch: int, assumed: Assumed | None = None
) -> str | None:
    """Why the plan cannot run, or None."""
    if plan.gpus != cluster.gpus:
        return f"the mesh has {plan.gpus} GPUs, the cluster {cluster.gpus}"
    if model.heads % plan.tp or model.ffn % plan.tp:
        return f"{model.heads} heads or a feed-forward width of {model.ffn} do not divide by tp"
    if plan.pp * plan.virtual > model.layers + 2:  # embedding and output can be chunks, too
        return f"{plan.pp * plan.virtual} chunks for {model.layers} layers"
    if plan.virtual > 1 and plan.pp == 1:
        return "one stage has nothing to interleave"
    if max(1, model.experts) % plan.ep or plan.dp % plan.ep:
        return f"ep must divide the {model.experts} experts and dp"
    if model.seq % (2 * plan.cp) or batch % (plan.dp * plan.micro_batch):
        return "the sequence does not divide by 2 cp, or the batch by dp and micro-batch"
    need, have = sum(memory(model, plan, batch).values()), cluster.gpu.memory
    if need > (assumed or Assumed()).usable * have:
        return f"needs {need / 1e9:.0f} GB of {have / 1e9:.0f}"
    return None


def activation_bytes(model: Model, plan: Plan) -> float:
    """Bytes that one layer keeps on a GPU from forward to backward, for one micro-batch.

    Korthikanti et al. 2022, table 2: sbh(10 + 24/t + 5as/ht), with sequence parallelism all divided
    by t. Of their 10, 2 are masks of dropout. Their 24 are 4 for queries and attention's output, 4
    for keys and values, 16 for a feed-forward layer of width 4h; here these follow the model.
    """
    tokens, h, t = plan.micro_batch * model.seq / plan.cp, model.width, plan.tp
    if plan.recompute == "full":
        return 2 * tokens * h
    each = (4 if model.gpt else 6) * model.ffn / h + (2 if model.experts else 0)
    whole = (10 if model.gpt else 8) / (t if plan.sequence else 1)
    split = (4 * model.queries / h + 4 * model.keys / h + model.used * each) / t
    scores = 0 if plan.fused or plan.recompute == "selective" else 5 * model.heads * model.seq / h
    return tokens * h * (whole + split + scores / t)


def memory(model: Model, plan: Plan, batch: int) -> dict[str, float]:
    """Bytes on a GPU of the first stage, which keeps the most micro-batches in flight.

    States: 2 + 2 + 12 bytes a parameter under the stage (Rajbhandari et al. 2020). Experts are
    sharded over their dp / ep replicas, all else over dp x cp. In flight: as many micro-batches as
    stages, and with interleaving (p - 1)/(p v) more (Korthikanti et al. 2022, section 4.2.3).
    """
    experts, rest = _held(model, plan)
    states = {}
    for kind, sizes in {
        "weights": (2, 0, 0),
        "gradients": (0, 2, 0),
        "optimizer": (0, 0, 12),
    }.items():
        states[kind] = zero_memory(rest, plan.dp * plan.cp, plan.stage, *sizes)
        states[kind] += zero_memory(experts, _replicas(plan), plan.stage, *sizes)
    if plan.stage == 3:  # two units are gathered at a time
        states["weights"] += 2 * BF16 * (experts + rest) / ceil(model.layers / plan.pp)
    p, tokens = plan.pp, plan.micro_batch * model.seq / plan.cp
    layers = ceil(model.layers / p) * min(p, plan.micro_batches(batch))
    if plan.virtual > 1:
        layers *= 1 + (p - 1) / (p * plan.virtual)
    kept = layers * activation_bytes(model, plan)
    if plan.recompute == "full":  # and one layer is computed again
        kept += activation_bytes(model, replace(plan, recompute="selective"))
    if p == 1:  # logits in fp32
        kept += 4 * tokens * model.vocabulary / plan.tp
    return states | {"activations": kept}


def _held(model: Model, plan: Plan) -> tuple[float, float]:
    """Parameters of a GPU before ZeRO: experts, all else. The first stage has the embedding."""
    share = ceil(model.layers / plan.pp) / model.layers
    table = model.vocabulary * model.width
    tables = table if model.tied or plan.pp > 1 else 2 * table
    blocks = model.parameters - model.routed - (1 if model.tied else 2) * table
    return model.routed * share / (plan.tp * plan.ep), (blocks * share + tables) / plan.tp


def _replicas(plan: Plan) -> int:
    return plan.dp * plan.cp // plan.ep


Operation = tuple[float, float]  # FLOPs, bytes


def layer(model: Model, plan: Plan) -> dict[str, Operation]:
    """The operations of a block's forward on one GPU, for one micro-batch.

    Of a model with experts, a block that has them; its first, dense ones are taken to be as long.
    """
    t, h, q, kv = plan.tp, model.width, model.queries, model.keys
    tokens = plan.micro_batch * model.seq / plan.cp
    projections, routed = model.attention_parameters, tokens * model.used
    # each token meets seq keys, or half as many if masked scores are skipped
    scores = 4 * tokens * model.seq * q / t * (0.5 if plan.fused else 1)
    experts = model.experts / plan.ep + model.shared if model.experts else 1
    found = {
        "projections": (
            2 * tokens * projections / t,
            BF16 * (projections / t + tokens * (2 * h + (2 * q + 2 * kv) / t)),
        ),
        "attention": (scores, BF16 * tokens * (2 * q + 2 * kv) / t),
        "feed-forward": (
            2 * routed * model.expert / t,
            BF16 * (experts * model.expert / t + routed * (2 * h + 2 * model.ffn / t)),
        ),
        # norms read and write twice, residual sums read twice and write once, and so do gates
        "elementwise": (
            0,
            BF16 * tokens * 10 * h / (t if plan.sequence else 1)
            + BF16 * routed * (2 if model.gpt else 3) * model.ffn / t,
        ),
    }
    if not plan.fused:  # softmax and dropout read and write all scores, five times in all
        found["scores"] = (0, BF16 * 5 * tokens * model.seq * model.heads / t)
    return found


def seconds(operation: Operation, gpu: GPU, assumed: Assumed) -> float:
    """The roofline: the arithmetic or the bytes, whichever takes longer."""
    flops, moved = operation
    return max(flops / (assumed.matmul * gpu.flops), moved / gpu.bandwidth)


def sent(model: Model, plan: Plan, element: int = BF16) -> dict[str, float]:
    """Bytes that a rank sends for a layer and a micro-batch, forward and backward, by axis.

    tensor: two all-reduces forward and two backward (or as many gathers and reduce-scatters), and
    two more if forward is done again. context: keys and values are gathered twice, and their
    gradients reduced once. expert: dispatch and combine, forward and backward, of balanced tokens.
    stages: to the next stage and back; this is for a whole stage, not for a layer.
    """
    tokens, t = plan.micro_batch * model.seq / plan.cp, plan.tp
    again = 1.5 if plan.recompute == "full" else 1
    size = element * tokens * model.width
    return {
        "tensor": 8 * again * size * (t - 1) / t,
        "context": 3 * 2 * element * tokens * model.keys / t * (plan.cp - 1),
        "expert": 4 * again * size / t * model.top_k * (plan.ep - 1) / plan.ep,
        "stages": 2 * size / t if plan.pp > 1 else 0.0,
    }


def data_sent(model: Model, plan: Plan, batch: int, element: int = BF16) -> list[float]:
    """Bytes that a rank sends in a step for ZeRO: of experts to their replicas, of all else."""
    groups = (_replicas(plan), plan.dp * plan.cp)
    return [
        element * elements_moved(held, ranks, plan.stage, plan.micro_batches(batch))
        for held, ranks in zip(_held(model, plan), groups, strict=True)
    ]


def messages(model: Model, cluster: Cluster, plan: Plan, assumed: Assumed) -> dict[str, float]:
    """Seconds of messages of one layer and one micro-batch, forward and backward, by axis.

    Experts out of the node: each GPU has its own card, and a token goes once to each node that has
    experts of it.
    """
    size, inner = sent(model, plan), plan.tp * plan.cp
    again = 1.5 if plan.recompute == "full" else 1

    def taken(kind: str, calls: float, link: Link) -> float:
        return calls * link.latency + size[kind] / (assumed.link * link.bandwidth)

    experts = cluster.link(plan.ep, inner)
    if plan.ep > 1 and experts is not cluster.inside:
        copies = min(model.top_k, model.spread or model.top_k) / model.top_k
        outside = 1 - max(1, cluster.node // inner) / plan.ep
        size["expert"] *= copies * outside * plan.ep / (plan.ep - 1)
    found = {
        "tensor": taken("tensor", 8 * again * (plan.tp - 1), cluster.ring(plan.tp, 1)),
        "context": taken("context", 3 * (plan.cp - 1), cluster.ring(plan.cp, plan.tp)),
        "expert": taken("expert", 4 * again * (plan.ep > 1), experts),
        "stages": taken("stages", 2 * (plan.pp > 1), cluster.link(2, inner * plan.dp)),
    }
    found["stages"] *= plan.virtual * plan.pp / model.layers
    return found


def step_time(
    model: Model, cluster: Cluster, plan: Plan, batch: int, assumed: Assumed | None = None
) -> Step:
    """Seconds of an optimizer step by cause, on the slowest stage.

    The step is (m + (p - 1)/v) micro-batches long (Narayanan et al. 2021, section 2.2). Gradients
    and parameters of ZeRO travel behind one micro-batch, at stages 2 and 3 behind each of them.
    """
    assumed = assumed or Assumed()
    m, p = plan.micro_batches(batch), plan.pp
    tokens = plan.micro_batch * model.seq / plan.cp
    times = {name: seconds(op, cluster.gpu, assumed) for name, op in layer(model, plan).items()}
    once = sum(times.values())
    again = {"none": 0.0, "full": once, "selective": times["attention"] + times.get("scores", 0)}
    head = 2 * tokens * model.vocabulary * model.width / plan.tp
    heads = 3 * head / (assumed.matmul * cluster.gpu.flops)
    longest = ceil(model.layers / p)
    # the last stage has the output layer, and fewer layers if they do not divide
    last = model.layers - longest * (p - 1)
    extra = max(0.0, heads - (longest - last) * 3 * once)
    shown = messages(model, cluster, plan, assumed)
    # no more hides than there is compute to hide behind
    part = max(1 - assumed.hidden, 1 - 3 * once / (sum(shown.values()) or inf))
    exposed = {axis: longest * part * taken for axis, taken in shown.items()}
    compute, repeated = longest * 3 * once + extra, longest * again[plan.recompute]
    micro = compute + repeated + sum(exposed.values())
    behind = assumed.behind * micro * (m if plan.stage > 1 else 1)
    data = max(0.0, _data(model, cluster, plan, batch, assumed) - behind)
    return Step(
        compute=m * compute,
        recompute=m * repeated,
        **{kind: m * taken for kind, taken in exposed.items()},
        bubble=(p - 1) / plan.virtual * micro,
        data=data,
    )


def _data(model: Model, cluster: Cluster, plan: Plan, batch: int, assumed: Assumed) -> float:
    """Seconds of ZeRO's messages in a step."""
    total, everyone = 0.0, plan.dp * plan.cp
    for size, ranks in zip(data_sent(model, plan, batch), (_replicas(plan), everyone), strict=True):
        link = cluster.ring(ranks, plan.tp * everyone // ranks)
        total += size / (assumed.link * link.bandwidth) + 2 * (ranks - 1) * link.latency
    return total


def mfu(model: Model, cluster: Cluster, batch: int, step: float) -> float:
    """Model FLOPs utilization: model FLOPs of a step over what the GPUs' peak allows."""
    return model.flops(batch) / (step * cluster.gpus * cluster.gpu.flops)


def plans(model: Model, gpus: int) -> Iterator[Plan]:
    """Every plan with powers of two on the inner axes, at 1 to 4 sequences a micro-batch."""
    powers = [2**k for k in range(12)]
    for tp, cp, pp in product(powers[:7], powers[:6], powers[:7]):
        if gpus % (tp * cp * pp):
            continue
        dp = gpus // (tp * cp * pp)
        for ep in [e for e in powers if dp % e == 0 and max(1, model.experts) % e == 0]:
            for stage, size, recompute, virtual in product(
                (1, 2, 3), (1, 2, 4), ("none", "full"), (1, 2, 4) if pp > 1 else (1,)
            ):
                yield Plan(dp, tp, pp, cp, ep, stage, size, recompute, virtual)


def search(
    model: Model, cluster: Cluster, batch: int, assumed: Assumed | None = None, best: int = 5
) -> list[tuple[float, Plan]]:
    """The `best` plans that can run, with their step times in seconds, fastest first."""
    found = [
        (step_time(model, cluster, plan, batch, assumed).total, plan)
        for plan in plans(model, cluster.gpus)
        if why_not(model, cluster, plan, batch, assumed) is None
    ]
    return sorted(found, key=lambda one: one[0])[:best]
