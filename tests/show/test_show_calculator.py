"""The memory calculator: its numbers against measured runs, its advice against its numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ddpz_lite as dz
from ddpz_lite import meter
from ddpz_lite.course.show import calculator
from ddpz_lite.course.show.calculator import (
    MODELS,
    Job,
    Shape,
    advice,
    cheapest,
    draw,
    traffic,
    usable,
)
from ddpz_lite.strategies.costs import zero_memory

STATE = ("parameters", "gradients", "optimizer")
LAYERS, WIDTH, LENGTH = 4, 128, 32


def state(job: Job) -> float:
    return sum(job.needs()[kind] for kind in STATE)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 4, 64])
def test_the_state_is_the_papers(stage, world):
    model = MODELS["6.7 B"]
    fp32 = Job(model, world, stage, "fp32")
    assert state(fp32) == pytest.approx(zero_memory(model.params, world, stage, 4, 4, 8))
    mixed = Job(model, world, stage, "mixed")
    grad_bytes = 4 if stage == 2 else 2  # sharded gradients are fp32; in stage 3 so are shards
    assert state(mixed) == pytest.approx(zero_memory(model.params, world, stage, 2, grad_bytes, 12))


def train(stage, half, batch, bucket_mb=0.5):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = dz.GPT(dz.GPTConfig(layers=LAYERS, width=WIDTH, heads=4, context=LENGTH))
    params = module.num_params()
    model, optimizer = dz.parallelize(
        module, torch.optim.AdamW, stage, mixed_precision=half, bucket_mb=bucket_mb
    )
    x = torch.zeros(batch, LENGTH, dtype=torch.long)
    for _ in range(2):  # the optimizer has its state from the second step on
        with meter.MemoryTimeline(model, optimizer) as timeline:
            dz.next_token_loss(model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
    return params, timeline.peak


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.extra)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_the_peak_is_that_of_a_measured_step(world, stage, half):
    """Four ranks are `extra`: lesson 08 asserts each stage there, in one precision."""
    batch = 32
    params, peak = dz.launch(train, world, args=(stage, half, batch))[0]
    shape = Shape(params, LAYERS, WIDTH, vocabulary=256)
    precision = "mixed" if half else "fp32"
    job = Job(shape, world, stage, precision, windows=batch, length=LENGTH)
    assert job.total() == pytest.approx(peak, rel=0.15)  # it varies with what is in flight


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_the_buckets_in_flight_where_activations_are_few(stage, half):
    """What is sent and what is received: without them the calculation is up to a half too low."""
    params, peak = dz.launch(train, 2, args=(stage, half, 1, 8.0))[0]
    shape = Shape(params, LAYERS, WIDTH, vocabulary=256)
    job = Job(shape, 2, stage, "mixed" if half else "fp32", length=LENGTH)
    assert job.total() == pytest.approx(peak, rel=0.15)


def test_the_buckets_in_flight_are_small_in_a_large_model():
    job = Job(MODELS["6.7 B"], 8, 2)
    activations = replace(job, length=1).needs()["activations"]
    assert replace(job, length=1).needs()["transient"] + activations == 2 * 2 * 4e6


def test_the_gradients_in_fp32_for_a_moment():
    """Stage 0 in mixed precision: 20 bytes per parameter when activations are nothing."""
    params, peak = dz.launch(train, 1, args=(0, torch.bfloat16, 1))[0]
    job = Job(Shape(params, LAYERS, WIDTH, vocabulary=256), length=LENGTH)
    assert job.total() == pytest.approx(20 * params)
    assert 20 * params < peak < 1.15 * job.total()  # and buckets, large next to this small model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("capacity", [24e9, 80e9])
@pytest.mark.parametrize("windows", [1, 8])
def test_what_it_advises_fits_and_each_part_of_it_is_needed(name, capacity, windows):
    job = Job(MODELS[name], 8, 0, "fp32", windows=windows)
    other = cheapest(job, capacity)
    if other is None:
        assert "No setting here helps" in advice(job, capacity)
        return
    assert other.total() <= capacity
    assert (other == job) == (job.total() <= capacity)
    for field in ("windows", "stage", "precision", "checkpointing", "world"):
        if getattr(other, field) != getattr(job, field):
            assert replace(other, **{field: getattr(job, field)}).total() > capacity, field


@pytest.mark.parametrize(
    ("job", "capacity", "words"),
    [
        (
            Job(MODELS["6.7 B"], 8, 0, windows=4),
            80e9,
            "Change: ZeRO-2. Then 66.1 GB, and a step sends as much as DDP does",
        ),
        (Job(MODELS["1.3 B"], 1, 0, windows=32), 80e9, "micro-batches of 8 instead of 32"),
        (Job(MODELS["13 B"], 1, 0), 80e9, "ranks instead of 1 (accumulate less, or"),
        (Job(MODELS["13 B"], 1, 0), 80e9, "1.5 x what DDP does"),
        (Job(MODELS["1.3 B"], 1, 2, windows=32), 80e9, "accumulated. Then"),
        (Job(MODELS["175 B"], 1024, 3), 8e9, "split the layers"),
        (Job(MODELS["6.7 B"], 64, 3), 80e9, "ZeRO-1 fits, too"),
        (Job(MODELS["125 M"], 1, 2), 80e9, "divides by 1"),
        (Job(MODELS["1.3 B"], 8, checkpointing=True), 80e9, "fits without checkpointing"),
        (Job(MODELS["125 M"]), 24e9, "Nothing needs to change"),
    ],
)
def test_advice_in_words(job, capacity, words):
    assert words in advice(job, capacity)


def test_accumulation_has_its_price_from_stage_2_on():
    """Lesson 10: m micro-batches send (m + 1) Ψ at stage 2, and 3m Ψ at stage 3."""
    job = Job(MODELS["13 B"], 8, 0, windows=4)
    assert [traffic(replace(job, stage=s)) for s in range(4)] == [1, 1, 1, 1.5]
    assert [traffic(replace(job, stage=s), 4) for s in range(4)] == [1, 1, 2.5, 6]
    assert traffic(replace(job, world=1)) == 0
    assert cheapest(job, 80e9) == replace(job, stage=2, checkpointing=True)


def test_the_figure_says_the_advice_and_its_table_adds_up():
    job = Job(MODELS["175 B"], 8, 0, "fp32", windows=8)
    _, alt, table = draw(job, 80e9)
    assert alt == advice(job, 80e9)
    numbers = {row[0]: row[1] for row in table[1:]}
    assert numbers["all"] == pytest.approx(sum(job.needs().values()))


def test_a_tenth_of_the_device_stays_free():
    job = Job(MODELS["6.7 B"], 8, 1, windows=4)
    assert usable(80e9) == pytest.approx(72e9)
    assert usable(80e9) < job.total() < 80e9
    assert advice(job, 80e9).startswith("It does not fit: 76.15 GB, and the limit is 72 GB")
    assert advice(job, job.total() / 0.9).startswith("It fits")


@pytest.mark.parametrize(
    "bad",
    [{"stage": 4}, {"world": 0}, {"windows": 1.5}, {"precision": "int8"}, {"optimizer": "Muon"}],
)
def test_a_setting_that_does_not_exist_is_named(bad):
    with pytest.raises(ValueError, match="must be"):
        Job(MODELS["125 M"], **bad)


def test_the_widget_has_a_static_version(capsys):
    calculator.calculator({"mine": Shape(1e9, 24, 1024), "yours": Shape(2e9, 24, 2048)})
    assert "Figure for Model: yours, World size: 8" in capsys.readouterr().out
