"""Corpora and the sampler: same bytes, same batches, torch's own indices, and errors that help."""

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from ddpz_lite import data


@pytest.fixture(scope="module")
def library():
    return data.corpus()


def test_default_is_two_megabytes_of_the_standard_library(library):
    assert len(library) == 2_000_000
    assert library.vocab_size == 256 and library.train_length == 1_800_000
    again = data.corpus()
    assert torch.equal(again.tokens, library.tokens)
    assert library.decode(library.tokens[:500]).startswith(
        '"""Record of phased-in incompatible language changes'
    )
    assert "/" not in repr(library) and "\\" not in repr(library)


def test_batches_follow_the_seed(library):
    x, y = library.batch(4, 32, seed=7)
    assert x.shape == y.shape == (4, 32) and x.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(x, library.batch(4, 32, seed=7)[0])
    assert not torch.equal(x, library.batch(4, 32, seed=8)[0])
    stream = torch.Generator().manual_seed(7)
    assert torch.equal(x, library.batch(4, 32, generator=stream)[0])
    assert not torch.equal(x, library.batch(4, 32, generator=stream)[0])
    torch.manual_seed(1)
    first = library.batch(4, 32)[0]
    torch.manual_seed(1)
    assert torch.equal(first, library.batch(4, 32)[0])


def test_splits_share_no_token(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("a" * 90 + "b" * 10)
    book = data.corpus(file)
    assert set(book.decode(book.split("train"))) == {"a"} and set(
        book.decode(book.split("validation"))
    ) == {"b"}
    assert set(book.batch(8, 5, split="validation")[1].flatten().tolist()) == {ord("b")}
    every = {
        int(i) for _ in range(200) for i in data.corpus(file, validation=0).batch(8, 98)[0][:, -1]
    }
    assert every == {ord("b")}, "the last windows must be reachable"


def test_bytes_and_characters_round_trip(tmp_path):
    text = "Ψ is the number of parameters, naïvely 16Ψ bytes\n"
    file = tmp_path / "t.txt"
    file.write_bytes(text.replace("\n", "\r\n").encode())
    for level, size in (("byte", len(text.encode())), ("char", len(text))):
        book = data.corpus(file, level=level)
        assert len(book) == size and book.decode(book.tokens) == text
        assert book.decode(book.encode("Ψ is")) == "Ψ is"
    assert book.vocab_size == len(set(text)) and int(book.tokens.max()) == book.vocab_size - 1
    with pytest.raises(ValueError, match=r"does not contain 'Z'.*level=\"byte\""):
        book.encode("Z")


def test_folder_is_read_in_order_and_says_what_it_left_out(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "z.bin").write_bytes(b"\0\1")
    book = data.corpus(tmp_path, validation=0)
    assert book.decode(book.tokens) == "onetwo"
    assert book.skipped == ("z.bin: a zero byte at offset 0",)
    assert "1 files left out" in repr(book)


def test_max_bytes_cuts_whole_characters(tmp_path):
    file = tmp_path / "t.txt"
    file.write_text("ab€€€€€€")  # each € is three bytes
    assert data.corpus(file, max_bytes=6, validation=0).tokens.numel() == 5
    assert len(data.corpus(file, max_bytes=100, validation=0)) == 20


def test_windows_cover_the_split_once(library):
    windows = library.windows(1000, "validation")
    assert len(windows) == 199
    x, y = windows[198]
    assert torch.equal(x, library.split("validation")[198_000:199_000].long()) and torch.equal(
        x[1:], y[:-1]
    )
    assert next(iter(DataLoader(windows, batch_size=3)))[0].shape == (3, 1000)
    with pytest.raises(IndexError):
        windows[199]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"no file or folder at .*gone.*Fix: check the path"),
        (b"", "holds no text"),
        (b" \n", "holds no text"),
        (b"abc\0def", "not UTF-8 text.*zero byte at offset 3"),
        (b"abc\xff\xfe def", "not UTF-8 text.*byte 0xff at offset 3"),
    ],
)
def test_bad_sources(tmp_path, content, message):
    file = tmp_path / "gone"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(FileNotFoundError if content is None else ValueError, match=message):
        data.corpus(file)


def test_bad_folder_size_and_options(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="holds no text"):
        data.corpus(tmp_path)
    (tmp_path / "x.txt").write_text("some text")
    monkeypatch.setattr("ddpz_lite.data.text.LARGEST_SOURCE", 5)
    with pytest.raises(ValueError, match=r"holds 9 bytes, more than 5.*max_bytes"):
        data.corpus(tmp_path)
    with pytest.raises(ValueError, match='"byte" or "char"'):
        data.corpus(level="word")
    with pytest.raises(ValueError, match="share in"):
        data.corpus(validation=1.0)


def test_bad_batches(tmp_path, library):
    file = tmp_path / "t.txt"
    file.write_text("a short text of 29 characters")
    book = data.corpus(file)
    with pytest.raises(
        ValueError, match=r"validation split of t.txt holds 2 tokens; a window of context 8 needs 9"
    ):
        book.batch(1, 8, split="validation")
    with pytest.raises(ValueError, match="both a seed and a generator"):
        library.batch(1, 8, seed=0, generator=torch.Generator())
    with pytest.raises(ValueError, match="split must be"):
        library.batch(1, 8, split="test")


# ---- the sampler


@pytest.mark.parametrize("length", [1, 2, 7, 12, 13, 100])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop", [True, False])
def test_sampler_equals_torchs(length, world, shuffle, drop):
    for rank in range(world):
        theirs = DistributedSampler(
            range(length), world, rank, shuffle=shuffle, seed=3, drop_last=drop
        )
        ours = data.RankSampler(
            length, rank, world, shuffle=shuffle, seed=3, uneven="drop" if drop else "pad"
        )
        assert len(ours) == len(theirs)
        for epoch in (0, 5):
            theirs.set_epoch(epoch)
            ours.set_epoch(epoch)
            assert list(ours) == list(theirs)


@pytest.mark.parametrize("length", [1, 3, 7, 12])
def test_keep_gives_every_sample_once(length):
    samplers = [data.RankSampler(length, rank, 4, uneven="keep") for rank in range(4)]
    given = [list(sampler) for sampler in samplers]
    assert sorted(chain.from_iterable(given)) == list(range(length))
    assert [len(s) for s in samplers] == [len(d) for d in given]


@pytest.mark.parametrize("uneven", ["pad", "drop", "keep"])
@pytest.mark.parametrize("stop", [0, 1, 4, 6])
def test_resume_in_the_middle_of_an_epoch(uneven, stop):
    for rank in range(3):
        full = data.RankSampler(20, rank, 3, seed=9, uneven=uneven)
        full.set_epoch(2)
        expected = list(full)
        first = data.RankSampler(20, rank, 3, seed=9, uneven=uneven)
        first.set_epoch(2)
        stream = iter(first)
        head = [next(stream) for _ in range(stop)]
        second = data.RankSampler(20, rank, 3, seed=9, uneven=uneven)
        second.load_state_dict(first.state_dict())
        assert first.state_dict() == full.state_dict(taken=stop)
        second.set_epoch(2)
        assert head + list(second) == expected
        assert list(second) == expected, "after the resumed epoch comes a whole one"


def test_resume_with_fewer_ranks_loses_and_repeats_nothing():
    old = [data.RankSampler(24, rank, 4) for rank in range(4)]
    seen = []
    for sampler in old:
        stream = iter(sampler)
        seen += [next(stream) for _ in range(3)]
    new = [data.RankSampler(24, rank, 3) for rank in range(3)]
    for sampler in new:
        sampler.load_state_dict(old[0].state_dict())
    assert sorted([*seen, *chain.from_iterable(new)]) == list(range(24))


def test_sampler_in_a_loader_and_alone():
    sampler = data.RankSampler(10, 1, 2, shuffle=False)
    assert [b.tolist() for b in DataLoader(range(10), batch_size=2, sampler=sampler)] == [
        [1, 3],
        [5, 7],
        [9],
    ]
    assert list(data.RankSampler(3, shuffle=False)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: data.RankSampler(5, 1), "only one of rank and world_size"),
        (lambda: data.RankSampler(5, 2, 2), "rank 2 is not in a world of 2"),
        (lambda: data.RankSampler(0, 0, 2), "has no samples"),
        (lambda: data.RankSampler(5, 0, 2, uneven="wrap"), "uneven must be one of"),
        (lambda: data.RankSampler(5, 0, 2).set_epoch(-1), "count from 0"),
        (
            lambda: data.RankSampler(5, 0, 2).load_state_dict(
                data.RankSampler(6, 0, 2).state_dict()
            ),
            "saved with length=6, this sampler has length=5",
        ),
    ],
)
def test_sampler_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
