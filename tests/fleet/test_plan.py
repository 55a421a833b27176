"""The planner against numbers that others published, and against itself where order must hold."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import product

import pytest

from ddpz_lite.course.fleet.hardware import a100, h100
from ddpz_lite.course.fleet.models import DEEPSEEK_V3, LLAMA_70B, LLAMA_405B, Model, gpt
from ddpz_lite.course.fleet.plan import (
    Assumed,
    Plan,
    activation_bytes,
    data_sent,
    layer,
    memory,
    mfu,
    plans,
    search,
    seconds,
    sent,
    step_time,
    why_not,
)
from ddpz_lite.course.fleet.published import GPT3, GPT_1T, GPT_530B, RUNS

BATCH = 512
GPT_22B = gpt("22B", 48, 6144, 64)
UNFUSED = {"fused": False, "tp": 8}


@pytest.mark.parametrize(
    ("model", "billions"),  # as their papers print them
    [
        (LLAMA_70B, 70.6),
        (LLAMA_405B, 405),
        (GPT3, 174.6),
        (GPT_530B, 529.6),
        (GPT_1T, 1008.0),
        (gpt("18.4B", 40, 6144, 48), 18.4),
        (DEEPSEEK_V3, 671),
    ],
)
def test_models_have_the_published_number_of_parameters(model, billions):
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_model_of_experts_uses_its_published_share_of_them():
    # 37 B include the embedding of a token, which only looks up one row
    used = DEEPSEEK_V3.active + DEEPSEEK_V3.vocabulary * DEEPSEEK_V3.width
    assert used / 1e9 == pytest.approx(37, rel=0.02)
    assert DEEPSEEK_V3.routed < DEEPSEEK_V3.parameters


def test_flops_are_the_formula_of_megatron():
    """Korthikanti et al. 2022, equation 7: 72 B s l h² (1 + s/6h + v/12lh)."""
    b, s, h, layers, v = 64, 2048, 12_288, 96, 51_200
    wanted = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert GPT3.flops(b) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("options", "terms"),  # Korthikanti et al. 2022, table 2, in units of sbh
    [
        ({"sequence": False}, 10 + 24 / 8 + 80 / 8),
        ({}, 34 / 8 + 80 / 8),
        ({"sequence": False, "recompute": "selective"}, 10 + 24 / 8),
        ({"recompute": "selective"}, 34 / 8),
        ({"recompute": "full"}, 2),
    ],
)
def test_activations_of_a_layer_are_those_of_the_table(options, terms):
    # GPT-3: 5as/h = 80
    assert activation_bytes(GPT3, Plan(**UNFUSED, **options)) == pytest.approx(
        2048 * 12_288 * terms
    )


def test_selective_recomputation_saves_the_published_share():
    for model, share in ((GPT3, 0.70), (GPT_530B, 0.65)):  # section 5
        all_of_it = activation_bytes(model, Plan(**UNFUSED))
        left = activation_bytes(model, Plan(**UNFUSED, recompute="selective"))
        assert 1 - left / all_of_it == pytest.approx(share, abs=0.01)


def test_interleaving_keeps_more_of_the_first_stage():
    plain = Plan(dp=1, tp=8, pp=8)
    chunks = replace(plain, virtual=3)
    kept = [memory(GPT3, plan, 64)["activations"] for plan in (plain, chunks)]
    assert kept[1] / kept[0] == pytest.approx(1 + 7 / (8 * 3))


def test_fewer_micro_batches_than_stages_keep_less():
    plan = Plan(dp=1, tp=8, pp=8)
    assert memory(GPT3, plan, 4)["activations"] == memory(GPT3, plan, 8)["activations"] / 2


def test_state_is_sixteen_bytes_a_parameter_and_sharded_by_the_stage():
    for stage, bytes_ in ((0, 16), (1, 4 + 12 / 8), (2, 2 + 14 / 8)):
        held = memory(LLAMA_70B, Plan(dp=8, stage=stage), BATCH)
        state = sum(held.values()) - held["activations"]
        assert state == pytest.approx(bytes_ * LLAMA_70B.parameters)


def test_experts_are_sharded_over_their_replicas_alone():
    plan = Plan(dp=128, pp=16, ep=64)
    held = memory(DEEPSEEK_V3, plan, 15_360)
    experts = DEEPSEEK_V3.routed * 4 / 61 / 64  # of 4 of 61 layers, a 64th
    assert held["optimizer"] > 12 * experts / 2
    assert held["optimizer"] < 12 * experts / 2 * 1.1


def test_bytes_of_tensor_parallelism_are_four_all_reduces_of_an_activation():
    plan = Plan(tp=8, dp=32, micro_batch=2)
    activation = 2 * 2 * 8192 * 8192  # bf16, two windows
    assert sent(LLAMA_70B, plan)["tensor"] == pytest.approx(4 * 2 * activation * 7 / 8)
    assert sent(LLAMA_70B, plan, element=4)["tensor"] == 2 * sent(LLAMA_70B, plan)["tensor"]


def test_zero_sends_as_often_as_its_stage_says():
    each = [sum(data_sent(LLAMA_70B, Plan(dp=256, stage=s), BATCH)) for s in (1, 2, 3)]
    assert [n / each[0] for n in each] == pytest.approx([1, 1.5, 3])  # 2, m + 1 and 3m, for m = 2


def test_tensor_parallelism_over_nodes_is_slower():
    took = [
        step_time(LLAMA_70B, h100(256), Plan(dp=256 // tp, tp=tp), BATCH).total
        for tp in (8, 16, 32, 64)
    ]
    assert took == sorted(took) and took[1] > 1.2 * took[0]


def test_the_same_mesh_is_slower_on_nodes_of_one():
    apart = replace(h100(256), node=1)
    plan = Plan(dp=32, tp=8)
    inside, outside = (step_time(LLAMA_70B, c, plan, BATCH) for c in (h100(256), apart))
    assert outside.tensor > 8 * inside.tensor and outside.compute == inside.compute


def test_the_bubble_is_the_known_share():
    plan = Plan(dp=32, tp=1, pp=8)
    step = step_time(GPT3, a100(256), plan, 32 * 16)
    assert step.bubble / (step.total - step.data) == pytest.approx(7 / (16 + 7))
    chunks = step_time(GPT3, a100(256), replace(plan, virtual=4), 32 * 16)
    assert chunks.bubble < step.bubble / 3.9


def test_more_of_anything_good_never_takes_longer():
    plan, cluster = Plan(dp=8, tp=8, pp=4), h100(256)
    base = step_time(LLAMA_70B, cluster, plan, BATCH).total
    for better in (Assumed(matmul=0.7), Assumed(link=0.9), Assumed(hidden=0.5)):
        assert step_time(LLAMA_70B, cluster, plan, BATCH, better).total < base
    wide = replace(cluster, inside=replace(cluster.inside, bandwidth=900e9))
    assert step_time(LLAMA_70B, wide, plan, BATCH).total < base
    full = step_time(LLAMA_70B, cluster, replace(plan, recompute="full"), BATCH)
    assert full.total > base and full.recompute > 0
    assert memory(LLAMA_70B, replace(plan, recompute="full"), BATCH)["activations"] < sum(
        memory(LLAMA_70B, plan, BATCH).values()
    )


def test_no_more_messages_hide_than_there_is_compute():
    plan = Plan(tp=64, dp=4)
    shown, hidden = (
        step_time(LLAMA_70B, h100(256), plan, BATCH, Assumed(hidden=part)) for part in (0.0, 1.0)
    )
    assert shown.tensor > 4 * shown.compute
    assert hidden.tensor == pytest.approx(shown.tensor - shown.compute, rel=0.02)


def test_recomputing_everything_costs_the_published_third():
    """Korthikanti et al. 2022, table 5: 29 to 32% more throughput without it."""
    selective = Plan(tp=8, pp=8, virtual=3, recompute="selective", fused=False)
    full = replace(selective, recompute="full", sequence=False)
    took = [step_time(GPT3, a100(64), plan, 64).total for plan in (full, selective)]
    assert took[0] / took[1] == pytest.approx(18.13 / 13.75, rel=0.05)


def test_few_tokens_are_bound_by_memory_and_many_by_arithmetic():
    gpu, assumed = h100(8).gpu, Assumed()
    for seq, bound in ((32, 1), (8192, 0)):
        operation = layer(replace(LLAMA_70B, seq=seq), Plan())["feed-forward"]
        parts = (operation[0] / (assumed.matmul * gpu.flops), operation[1] / gpu.bandwidth)
        assert seconds(operation, gpu, assumed) == parts[bound] == max(parts)


def test_experts_over_nodes_take_as_long_as_they_compute():
    """DeepSeek-AI 2024, section 3.2.1: computation to communication is about 1 to 1."""
    run = next(run for run in RUNS if run.name == "DeepSeek-V3")
    step = step_time(run.model, run.cluster, run.plan, run.batch)
    assert 0.6 < step.expert / step.compute < 1.2
    near = replace(run.cluster, node=64)
    assert step_time(run.model, near, run.plan, run.batch).expert < 0.6 * step.expert
    everywhere = replace(run.model, spread=0)  # each of 8 experts may be on another node
    slow = step_time(everywhere, run.cluster, run.plan, run.batch).expert
    assert slow == pytest.approx(2 * step.expert, rel=0.01)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(dp=128), "128 GPUs"),
        (Plan(dp=2, tp=128), "64 heads"),
        (Plan(dp=2, pp=128), "128 chunks for 80 layers"),
        (Plan(dp=256, virtual=2), "nothing to interleave"),
        (Plan(dp=256, ep=2), "ep must divide"),
        (Plan(dp=256, micro_batch=4), "does not divide"),
        (Plan(dp=256, stage=3), "needs 192 GB of 80"),
    ],
)
def test_a_plan_that_cannot_run_says_why(plan, words):
    assert words in why_not(LLAMA_70B, h100(256), plan, BATCH)


def test_the_search_finds_the_best_of_a_small_grid():
    """Against a search written here, over all divisors of 16 GPUs."""
    small = Model("small", 16, 4096, 32, 14_336, 32_000, 4096, kv_heads=8)
    cluster, sizes = h100(16), [1, 2, 4, 8, 16]
    found = {}
    for tp, cp, pp, stage, size, recompute, virtual in product(
        sizes, sizes, sizes, (1, 2, 3), (1, 2, 4), ("none", "full"), (1, 2, 4)
    ):
        dp, rest = divmod(16, tp * cp * pp)
        plan = Plan(dp, tp, pp, cp, 1, stage, size, recompute, virtual)
        if dp and not rest and why_not(small, cluster, plan, 64) is None:
            found[plan] = step_time(small, cluster, plan, 64).total
    best = search(small, cluster, 64, best=3)
    assert [took for took, _ in best] == sorted(found.values())[:3]
    assert all(found[plan] == took for took, plan in best)


def test_every_plan_of_the_search_uses_all_gpus():
    assert {plan.gpus for plan in plans(LLAMA_70B, 64)} == {64}
    assert {plan.ep for plan in plans(LLAMA_70B, 64)} == {1}
    assert max(plan.ep for plan in plans(DEEPSEEK_V3, 64)) == 64


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_predictions_beside_publications(run):
    """How far off each is, so that a change of the planner is seen here."""
    step = step_time(run.model, run.cluster, run.plan, run.batch)
    off = step.total / run.seconds - 1
    far = {"Llama, 131k tokens": -0.39, "DeepSeek-V3": 0.32, "175B, Megatron-LM": -0.16}
    assert abs(off) < 0.15 if run.name not in far else off == pytest.approx(far[run.name], abs=0.02)
    assert sum(asdict(step).values()) == pytest.approx(step.total)


@pytest.mark.parametrize(
    ("name", "published"),  # model FLOPs utilization as the papers print it
    [
        ("GPT-3 on 64", 0.514),
        ("530B on 280", 0.560),
        ("175B, MegaScale", 0.552),
        ("175B, Megatron-LM", 0.412),
        ("Llama on 8,192", 0.43),
        ("Llama on 16,384", 0.41),
        ("Llama, 131k tokens", 0.38),
    ],
)
def test_published_utilizations_follow_from_the_published_steps(name, published):
    run = next(run for run in RUNS if run.name == name)
    assert mfu(run.model, run.cluster, run.batch, run.seconds) == pytest.approx(
        published, abs=0.008
    )


def test_the_published_training_days_follow_from_the_published_flops():
    """Narayanan et al. 2021, table 2: 84 and 23 days for 300e9 tokens of GPT-3."""
    for run, days in zip(RUNS[:2], (84, 23), strict=True):
        steps = 300e9 / (run.batch * run.model.seq)
        assert run.seconds * steps / 86_400 == pytest.approx(days, rel=0.03)
