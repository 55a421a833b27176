"""Training runs as their papers report them: the mesh, and one measured number.

What a paper does not say is a field of the plan anyway; `note` names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ddpz_lite.course.fleet.hardware import Cluster, a100, h100, h800
from ddpz_lite.course.fleet.models import DEEPSEEK_V3, LLAMA_405B, Model, gpt
from ddpz_lite.course.fleet.plan import Plan, mfu


@dataclass(frozen=True)
class Run:
    """A published run.

    value: seconds of a step ("s"), model FLOP/s of a GPU ("model"), FLOP/s with recomputation
    counted ("with recompute"), or GPU hours for 1e12 tokens ("hours").
    """

    name: str
    source: str
    model: Model
    on: Callable[[int], Cluster]
    plan: Plan
    batch: int
    value: float
    unit: str = "s"
    note: str = ""

    @property
    def cluster(self) -> Cluster:
        return self.on(self.plan.gpus)

    @property
    def seconds(self) -> float:
        """The measured step, in seconds. Narayanan et al. 2021, equation 3 counts recomputation."""
        m, gpus = self.model, self.plan.gpus
        if self.unit == "s":
            return self.value
        if self.unit == "hours":
            return self.value * 3600 / gpus * self.batch * m.seq / 1e12
        flops = m.flops(self.batch)
        if self.unit == "with recompute":  # layers count 8 a parameter and token, the output 6
            output = 6 * m.vocabulary * m.width * self.batch * m.seq
            flops = (flops - output) * 4 / 3 + output
        return flops / (gpus * self.value)

    def compared_with(self, predicted: float) -> str:
        """A line: mesh, published seconds of a step, MFU, predicted seconds, and their error."""
        plan, seconds = self.plan, self.seconds
        sizes = {axis: getattr(plan, axis) for axis in ("tp", "cp", "ep", "pp", "dp")}
        mesh = " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
        reached = mfu(self.model, self.cluster, self.batch, seconds)
        error = round(100 * predicted / seconds) - 100
        return (
            f"{self.name:18} {self.source:26} {mesh:18} "
            f"{seconds:7.2f} s {reached:.0%} {predicted:6.2f} s {error:+4d}%"
        )


GPT3 = gpt("GPT-3 174.6B", 96, 12_288, 96)
GPT_530B = gpt("GPT 529.6B", 105, 20_480, 128)
GPT_1T = gpt("GPT 1008B", 128, 25_600, 160)
MEGASCALE = gpt("175B", 96, 12_288, 128, vocabulary=64_000)

# Narayanan et al. 2021: all recompute everything, and none skips masked scores.
_2021 = Plan(tp=8, recompute="full", sequence=False, fused=False)
# Korthikanti et al. 2022: sequence parallelism, and attention's scores recomputed.
_2022 = Plan(tp=8, recompute="selective", fused=False)
_LLAMA = Plan(tp=8, pp=16, virtual=8, stage=2)
_MEGASCALE = Plan(dp=192, tp=8, pp=8, virtual=6)
_CHUNKS = "chunks of a stage"

RUNS = [
    Run("GPT-3 on 384", "Narayanan 2021, table 2", GPT3, a100,
        replace(_2021, dp=4, pp=12, virtual=2), 1536, 153e12, "with recompute", _CHUNKS),
    Run("GPT-3 on 1,536", "Narayanan 2021, table 2", GPT3, a100,
        replace(_2021, dp=16, pp=12, virtual=2), 1536, 141e12, "with recompute", _CHUNKS),
    Run("530B on 2,520", "Narayanan 2021, table 1", GPT_530B, a100,
        replace(_2021, dp=9, pp=35, virtual=3), 2520, 163e12, "with recompute", _CHUNKS),
    Run("1T on 3,072", "Narayanan 2021, table 1", GPT_1T, a100,
        replace(_2021, dp=6, pp=64, virtual=2), 3072, 163e12, "with recompute", _CHUNKS),
    Run("GPT-3 on 64", "Korthikanti 2022, table 5", GPT3, a100,
        replace(_2022, pp=8, virtual=3), 64, 13.75),
    Run("530B on 280", "Korthikanti 2022, table 5", GPT_530B, a100,
        replace(_2022, pp=35, virtual=3), 280, 37.83),
    Run("175B, Megatron-LM", "Jiang 2024, table 2", MEGASCALE, a100, _MEGASCALE, 6144, 8.57),
    Run("175B, MegaScale", "Jiang 2024, table 2", MEGASCALE, a100, _MEGASCALE, 6144, 6.34),
    Run("Llama on 8,192", "Llama Team 2024, table 4", LLAMA_405B, h100,
        replace(_LLAMA, dp=64), 2048, 430e12, "model", "micro-batch"),
    Run("Llama on 16,384", "Llama Team 2024, table 4", LLAMA_405B, h100,
        replace(_LLAMA, dp=128), 2048, 400e12, "model", "micro-batch"),
    Run("Llama, 131k tokens", "Llama Team 2024, table 4", replace(LLAMA_405B, seq=131_072), h100,
        replace(_LLAMA, dp=8, cp=16), 128, 380e12, "model", "micro-batch, FLOPs of attention"),
    Run("DeepSeek-V3", "DeepSeek 2024, section 1", DEEPSEEK_V3, h800,
        Plan(dp=128, pp=16, ep=64), 15_360, 180e3, "hours", "micro-batch"),
]  # fmt: skip
