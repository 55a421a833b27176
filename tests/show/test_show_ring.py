"""The ring, step by step: what the model reads from traces, and the still form of the widget."""

import pytest
import torch
import torch.distributed as dist

import ddpz_lite as dz
from ddpz_lite.course.show import ring
from ddpz_lite.course.show.ring import Move, RingSteps, ring_steps


def trace(world, length=None, spoil=None):
    """What a ring of `world` ranks leaves behind, computed in one process: [rank][step]."""
    tensors = [torch.full((length or world,), 10.0**rank) for rank in range(world)]
    chunks = [x.tensor_split(world) for x in tensors]
    states = [[x.clone()] for x in tensors]
    for step in range(2 * (world - 1)):
        adds = step < world - 1
        back = step if adds else step - world  # the first chunk to be copied is rank + 1
        sent = [chunks[rank][(rank - back) % world].clone() for rank in range(world)]
        for rank in range(world):
            into = chunks[rank][(rank - 1 - back) % world]
            into.copy_(sent[rank - 1] + (into if adds else 0))
        if spoil == step:
            chunks[0][0].mul_(2)
        for rank in range(world):
            states[rank].append(tensors[rank].clone())
    return states


@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_a_ring_reduces_every_chunk_and_moves_one_per_rank_and_step(world):
    model = RingSteps({world: trace(world, length=2 * world + 1)})
    assert (model.step, model.last, model.finished) == (0, 2 * (world - 1), 0)
    for step in range(1, model.last + 1):
        model.go(1)
        moves = model.moves()
        assert [move.receiver for move in moves] == list(range(world))
        assert all(move.sender == (move.receiver - 1) % world for move in moves)
        assert {move.how for move in moves} == {"added" if step < world else "copied"}
    assert model.finished == world**2
    model.go(1)
    assert model.step == model.last
    model.go(-1_000)
    assert model.step == 0 and model.moves() == []


def test_the_words_of_a_step_and_its_table():
    model = RingSteps({2: trace(2)})
    assert model.sentence == "Before the first of 2 steps: each rank holds its own numbers."
    model.go(1)
    assert model.moves() == [Move(1, 0, 1, "added"), Move(0, 1, 0, "added")]
    assert model.sentence == (
        "First half, step 0: each rank receives one chunk from the rank on its left and adds it: "
        "rank 0 chunk 1, rank 1 chunk 0. 2 of 4 chunks hold the whole sum."
    )
    assert model.table == [
        ["rank", "chunk 0", "chunk 1"],
        ["rank 0", "0", "0+1"],
        ["rank 1", "0+1", "1"],
    ]


def test_a_mistake_in_the_ring_is_shown_as_it_is():
    model = RingSteps({3: trace(3, spoil=0)})
    model.go(1)
    assert Move(2, 0, 0, "other") in model.moves()
    assert "neither adding nor copying" in model.sentence
    assert model.table[1][1] == "2x0"


def test_another_world_starts_from_the_beginning():
    model = RingSteps({2: trace(2), 3: trace(3)})
    assert model.world == 3
    model.go(2)
    model.choose(2)
    assert (model.world, model.step, model.last) == (2, 0, 2)
    with pytest.raises(ValueError, match="no trace of 4 ranks"):
        model.choose(4)


@pytest.mark.parametrize(
    ("traces", "status"),
    [
        ({}, "at least one world size"),
        ({1: trace(2)[:1]}, "2 to 7 ranks"),
        ({3: trace(2)}, "got 2 lists"),
        ({2: [trace(2)[0], trace(2)[1][:-1]]}, "of lengths"),
        ({2: [[torch.tensor([1.0, 1.5])], [torch.ones(2)]]}, "expected one value"),
        ({2: [[torch.tensor([1.0, 2.0, 3.0])], [torch.ones(3)]]}, "10\\*\\*r"),
        ({2: [[torch.full((2,), torch.inf)], [torch.ones(2)]]}, "expected one value"),
    ],
)
def test_what_is_not_a_trace_is_refused(traces, status):
    with pytest.raises(ValueError, match=status):
        RingSteps(traces)


def test_without_a_kernel_all_steps_are_shown(monkeypatch):
    shown = {}
    monkeypatch.setattr(ring, "show_live", lambda controls, **form: shown.update(form))
    ring_steps({2: trace(2), 3: trace(3)})
    assert "The ring of 3 ranks in 4 steps" in shown["text"]
    assert shown["still"].count("<tr>") == 6  # a header and steps 0 to 4
    assert '<img alt="The ring of 3 ranks' in shown["still"]


def test_the_buttons_step_and_the_words_follow(monkeypatch):
    shown = []
    monkeypatch.setattr(ring, "in_notebook", lambda: True)
    monkeypatch.setattr(ring, "show_live", lambda controls, **form: shown.extend(controls))
    ring_steps({2: trace(2), 3: trace(3)})
    worlds, buttons, status, picture = shown
    forward, back, start = buttons.children
    first = picture.value
    forward.click()
    assert 'role="status"' in status.value and "First half, step 0" in status.value
    assert picture.value != first
    back.click()
    assert picture.value == first
    forward.click()
    worlds.value = 2
    assert "Before the first of 2 steps" in status.value
    forward.click()
    start.click()
    assert "Before the first" in status.value


def pass_on(chunks, out, into, add):
    rank, world = dist.get_rank(), len(chunks)
    arriving = torch.empty_like(chunks[into])
    sending = dist.isend(chunks[out].clone(), (rank + 1) % world)
    dist.recv(arriving, (rank - 1) % world)
    sending.wait()
    chunks[into].copy_(chunks[into] + arriving if add else arriving)


def add_step(chunks, step):
    rank, world = dist.get_rank(), len(chunks)
    pass_on(chunks, (rank - step) % world, (rank - step - 1) % world, add=True)


def copy_step(chunks, step):
    rank, world = dist.get_rank(), len(chunks)
    pass_on(chunks, (rank + 1 - step) % world, (rank - step) % world, add=False)


def test_a_film_of_real_ranks_is_a_trace_of_a_ring():
    run = dz.launch(ring.ring_film, world_size=3, args=(add_step, copy_step))
    model = RingSteps({3: list(run)})
    model.go(model.last)
    assert (model.last, model.finished) == (4, 9)
