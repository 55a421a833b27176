"""The models: shapes, seeds, the meta device, and arithmetic that torch's counters confirm."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ddpz_lite.model import CNN, GPT, MLP, GPTConfig, next_token_loss

SMALL = GPTConfig(vocab_size=37, context=12, layers=2, heads=2, width=16)


def build(config=SMALL, seed=0):
    torch.manual_seed(seed)
    return GPT(config)


def tokens(batch=3, time=12, vocab=37):
    return torch.randint(vocab, (batch, time), generator=torch.Generator().manual_seed(5))


def test_gpt_shapes_and_first_loss_is_that_of_guessing():
    x = tokens()
    logits = build()(x)
    assert logits.shape == (3, 12, 37)
    assert next_token_loss(logits, x).item() == pytest.approx(
        torch.tensor(37.0).log().item(), abs=0.05
    )
    torch.testing.assert_close(
        next_token_loss(logits, x, "sum"), next_token_loss(logits, x) * x.numel()
    )


def test_same_seed_same_weights_other_seed_others():
    a, b, c = build(seed=1), build(seed=1), build(seed=2)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.head.weight, c.head.weight)


def test_gpt_does_not_look_ahead():
    model, x = build(), tokens()
    changed = x.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 37
    torch.testing.assert_close(model(x)[:, :7], model(changed)[:, :7])
    assert not torch.allclose(model(x)[:, 7], model(changed)[:, 7])


@pytest.mark.parametrize("tied", [False, True])
def test_num_params_by_hand(tied):
    config = GPTConfig(vocab_size=37, context=12, layers=2, heads=2, width=16, tied=tied)
    c, block = 16, 12 * 16**2 + 13 * 16  # matrices; biases 3c + c + 4c + c and two norms 4c
    expected = 37 * c + 12 * c + 2 * block + 2 * c + (0 if tied else 37 * c)
    assert build(config).num_params() == expected
    assert len(list(build(config).parameters())) == 2 + 2 * 12 + 2 + (not tied)


@pytest.mark.parametrize("tied", [False, True])
def test_meta_device_then_reset_gives_the_same_model(tied):
    config = GPTConfig(vocab_size=37, context=12, layers=2, heads=2, width=16, tied=tied)
    with torch.device("meta"):
        model = GPT(config)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.reset_parameters()
    other = build(config)
    torch.manual_seed(3)
    other.reset_parameters()
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )
    assert (model.head.weight is model.tokens.weight) is tied
    assert model.num_params() == other.num_params()


def test_flops_per_token_equals_torchs_counter():
    """Forward is a third of the formula. Attention is unfused: the counter sees each matmul."""
    model, x = build(), tokens()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = next_token_loss(model(x), x)
        forward = counter.get_total_flops()
        loss.backward()
    assert forward == model.flops_per_token() * x.numel() // 3
    assert counter.get_total_flops() == model.flops_per_token() * x.numel()


def test_gpt_learns_text_it_can_memorise():
    model, x = build(), tokens(time=13)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = next_token_loss(model(x[:, :-1]), x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 < 3 < losses[0]


def test_blocks_are_equal_units():
    model = build()
    assert len(model.blocks) == 2
    assert len({sum(p.numel() for p in block.parameters()) for block in model.blocks}) == 1


def test_generate():
    model, prompt = (
        build(GPTConfig(vocab_size=37, context=12, layers=2, heads=2, width=16, dropout=0.5)),
        tokens(),
    )
    out = model.generate(prompt, 5, generator=torch.Generator().manual_seed(0))
    assert out.shape == (3, 17) and torch.equal(out[:, :12], prompt)
    assert torch.equal(out, model.generate(prompt, 5, generator=torch.Generator().manual_seed(0)))
    greedy = model.generate(prompt, 5, temperature=0)
    assert torch.equal(greedy, model.generate(prompt, 5, top_k=1))
    assert torch.equal(prompt, model.generate(prompt, 0))
    model.blocks[0].eval()
    model.generate(prompt, 1)
    assert model.training and not model.blocks[0].training


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GPTConfig(width=10, heads=4), "width 10 does not divide into 4 heads.*12"),
        (lambda: GPTConfig(layers=0), "layers must be a whole number of at least 1, got 0"),
        (lambda: GPTConfig(layers=2.0), "layers must be a whole number"),
        (lambda: GPTConfig(dropout=1.0), r"dropout must lie in \[0, 1\)"),
        (lambda: build()(tokens(time=13)), "window of 13 tokens does not fit the context of 12"),
        (lambda: build()(tokens()[0]), "for one sequence, add a dimension"),
        (lambda: build().generate(tokens()[:, :0], 1), "prompt must be"),
        (lambda: build().generate(tokens(), 1, top_k=38), r"top_k must lie in 1\.\.37"),
        (lambda: next_token_loss(build()(tokens()), tokens()[:, 1:]), "need targets"),
        (lambda: MLP([3]), "input and an output width"),
        (lambda: CNN()(torch.zeros(2, 8, 8)), "expects images of shape"),
    ],
)
def test_errors_name_the_cure(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_mlp_takes_odd_sizes():
    model = MLP([7, 13, 5, 3])
    assert model(torch.zeros(2, 4, 7)).shape == (2, 4, 3)
    assert model.num_params() == 8 * 13 + 14 * 5 + 6 * 3
    assert [type(unit[-1]) for unit in model.blocks] == [nn.ReLU, nn.ReLU, nn.Linear]
    assert (model(torch.randn(64, 7)) < 0).any()


@pytest.mark.parametrize("side", [8, 28, 9])
def test_cnn_fits_digits_and_keeps_statistics(side):
    model = CNN()
    assert model(torch.randn(5, 1, side, side)).shape == (5, 10)
    buffers = dict(model.named_buffers())
    assert len(buffers) == 6 and buffers["blocks.0.1.num_batches_tracked"] == 1
    model.reset_parameters()
    assert dict(model.named_buffers())["blocks.0.1.num_batches_tracked"] == 0
