"""Text as tokens; the default is the source code of Python's standard library.

Nothing is downloaded. The same source gives the same tokens, the same seed the same batch.
"""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

DEFAULT_BYTES = 2_000_000  # how much of the standard library is read
LARGEST_SOURCE = 100_000_000  # bytes; a larger source needs max_bytes
_NOT_TEXT_TO_LEARN = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, repr=False)
class Corpus:
    """A text as tokens. Made by `corpus()`.

    name: what was read. level: "byte" or "char". tokens: (length,) uint8 for bytes, int32 for
    characters. alphabet: the characters by token number, empty at byte level. train_length: the
    number of tokens for training, at the start; the rest is for validation. skipped: files of a
    folder that are not text.
    """

    name: str
    level: str
    tokens: Tensor = field(repr=False)
    alphabet: str
    train_length: int
    skipped: tuple[str, ...] = ()

    @property
    def vocab_size(self) -> int:
        """Number of different tokens: 256 for bytes, else the size of the alphabet."""
        return len(self.alphabet) if self.level == "char" else 256

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        left_out = f", {len(self.skipped)} files left out as not text" if self.skipped else ""
        return (
            f"<corpus: {self.name}; {self.train_length:,} tokens to train and "
            f"{len(self) - self.train_length:,} to validate, {self.vocab_size} kinds of "
            f"{self.level}{left_out}>"
        )

    def split(self, name: str) -> Tensor:
        """The tokens (length,) of "train" or "validation": a view, not a copy."""
        if name not in ("train", "validation"):
            raise ValueError(f'corpus: split must be "train" or "validation", got {name!r}.')
        return (
            self.tokens[: self.train_length]
            if name == "train"
            else self.tokens[self.train_length :]
        )

    def batch(
        self,
        batch_size: int,
        context: int,
        *,
        split: str = "train",
        seed: int | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Random windows: inputs (batch_size, context) int64, and targets, one token later.

        The same seed gives the same batch. A generator gives the next batch of its stream; with
        neither, torch's global generator does. Ranks need different seeds, or all of them learn
        from the same windows.
        """
        if seed is not None and generator is not None:
            raise ValueError(
                "corpus.batch: both a seed and a generator are given. Fix: give one of them."
            )
        if batch_size < 1:
            raise ValueError(f"corpus.batch: batch_size must be at least 1, got {batch_size}.")
        tokens = self._windowed(split, context)
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(tokens) - context, (batch_size,), generator=generator)  # (B,)
        places = starts[:, None] + torch.arange(context + 1)  # (B, T + 1)
        windows = tokens[places].long().to(device)  # (B, T + 1)
        return windows[:, :-1], windows[:, 1:]

    def windows(self, context: int, split: str = "train") -> Windows:
        """The split cut into windows that do not overlap, for a DataLoader with a RankSampler."""
        return Windows(self._windowed(split, context), context)

    def _windowed(self, split: str, context: int) -> Tensor:
        tokens = self.split(split)
        if context < 1 or len(tokens) < context + 1:
            raise ValueError(
                f"corpus: the {split} split of {self.name} holds {len(tokens)} tokens; a window of "
                f"context {context} "
                f"needs {max(context, 1) + 1}. Fix: use a shorter context, more text, or another "
                "validation share."
            )
        return tokens

    def encode(self, text: str) -> Tensor:
        """Text to tokens (length,) int64."""
        if self.level == "byte":
            return torch.tensor(list(text.encode()), dtype=torch.long)  # (bytes,)
        number = {character: i for i, character in enumerate(self.alphabet)}
        unknown = sorted(set(text) - set(number))
        if unknown:
            raise ValueError(
                f"corpus.encode: {self.name} does not contain {unknown[0]!r}, so it has no token. "
                f'Fix: leave it out, or use level="byte", which can write any text.'
            )
        numbers = [number[character] for character in text]
        return torch.tensor(numbers, dtype=torch.long)  # (characters,)

    def decode(self, tokens: Tensor) -> str:
        """Tokens (length,) to text. Bytes that are not UTF-8 become U+FFFD."""
        if tokens.dim() != 1:
            raise ValueError(
                f"corpus.decode: one sequence at a time, got shape {tuple(tokens.shape)}. "
                "Fix: tokens[0]."
            )
        numbers = tokens.tolist()
        if self.level == "byte":
            return bytes(numbers).decode(errors="replace")
        return "".join(self.alphabet[i] for i in numbers)


class Windows(Dataset):
    """Windows of tokens that do not overlap: item i is (input, target), both (context,) int64."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.context
        window = self.tokens[start : start + self.context + 1].long()  # (context + 1,)
        return window[:-1], window[1:]


def corpus(
    source: str | os.PathLike | None = None,
    *,
    level: str = "byte",
    validation: float = 0.1,
    max_bytes: int | None = None,
) -> Corpus:
    """Read a text corpus.

    source: None for the standard library's sources (the first 2,000,000 bytes in order of path: the
    same bytes for one build of Python), or a file, or a folder whose text files are read in order
    of path. level: "byte" or "char". validation: the share at the end that is kept for validation.
    max_bytes: read no more than this.

    Raises FileNotFoundError for a source that is not there; ValueError for one that is empty, not
    UTF-8 text, or above 100 MB without max_bytes.
    """
    if level not in ("byte", "char"):
        raise ValueError(f'corpus: level must be "byte" or "char", got {level!r}.')
    if not 0.0 <= validation < 1.0:
        raise ValueError(f"corpus: validation is a share in [0, 1), got {validation}.")
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"corpus: max_bytes must be at least 1, got {max_bytes}.")
    name, text, skipped = (
        _standard_library(max_bytes) if source is None else _own_source(Path(source), max_bytes)
    )
    if not text.strip():
        raise ValueError(
            f"corpus: {name} holds no text. Fix: name a file or folder with text, or omit source."
        )
    alphabet = "".join(sorted(set(text))) if level == "char" else ""
    tokens = _tokens(text, alphabet)
    return Corpus(
        name, level, tokens, alphabet, len(tokens) - int(len(tokens) * validation), skipped
    )


def _tokens(text: str, alphabet: str) -> Tensor:
    if not alphabet:
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)  # (bytes,)
    points = torch.tensor([ord(one) for one in text], dtype=torch.int32)  # (characters,)
    known = torch.tensor([ord(one) for one in alphabet], dtype=torch.int32)  # (vocab_size,), sorted
    return torch.searchsorted(known, points, out_int32=True)  # (characters,)


def _standard_library(max_bytes: int | None) -> tuple[str, str, tuple[str, ...]]:
    root = Path(sysconfig.get_path("stdlib"))
    # _sysconfigdata has the paths of the machine that built Python, so it differs everywhere
    files = [
        p
        for p in _files(root, _NOT_TEXT_TO_LEARN)
        if p.suffix == ".py" and "_sysconfigdata" not in p.name
    ]
    text, _ = _read(files, max_bytes or DEFAULT_BYTES)
    version = sysconfig.get_python_version()
    return f"standard library of Python {version}", text, ()


def _own_source(path: Path, max_bytes: int | None) -> tuple[str, str, tuple[str, ...]]:
    if not path.exists():
        raise FileNotFoundError(
            f"corpus: there is no file or folder at {str(path)!r}. Fix: check the path (it is "
            f"relative to {os.getcwd()!r}), or omit source to read the standard library's sources."
        )
    if not path.is_dir() and not path.is_file():
        raise ValueError(
            f"corpus: {str(path)!r} is neither a file nor a folder. Fix: name one with text."
        )
    files = _files(path) if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files)
    if max_bytes is None and size > LARGEST_SOURCE:
        raise ValueError(
            f"corpus: {str(path)!r} holds {size:,} bytes, more than {LARGEST_SOURCE:,}. "
            f"Fix: name a part of it, or limit it: max_bytes=10_000_000."
        )
    text, skipped = _read(files, max_bytes)
    if skipped and len(skipped) == len(files):
        raise ValueError(
            f"corpus: {str(path)!r} is not UTF-8 text (files read: {len(files)}, the first: "
            f"{skipped[0]}). Fix: convert it to UTF-8, or name another source."
        )
    return path.name, text, skipped


def _files(root: Path, leave_out: set[str] = frozenset()) -> list[Path]:
    """All files below root in order of path; hidden ones and linked folders are left out."""
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in leave_out and not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((p for p in found if p.is_file()), key=lambda p: p.relative_to(root).as_posix())


def _read(files: list[Path], max_bytes: int | None) -> tuple[str, tuple[str, ...]]:
    """The text of the files, cut at max_bytes; and the skipped files, with reasons."""
    parts: list[str] = []
    skipped: list[str] = []
    left = max_bytes or LARGEST_SOURCE
    for file in files:
        if left <= 0:
            break
        with file.open("rb") as stream:
            raw = stream.read(left + 4)
        text, problem = _decode(raw, cut=len(raw) > left)
        if problem:
            skipped.append(f"{file.name}: {problem}")
            continue
        data = text.replace("\r\n", "\n").encode()
        parts.append(data[:left].decode(errors="ignore"))
        left -= len(data)
    return "".join(parts), tuple(skipped)


def _decode(raw: bytes, cut: bool) -> tuple[str, str]:
    """(text, "") or ("", problem). A cut text may end in the middle of a character."""
    zero = raw.find(b"\0")
    if zero >= 0:
        return "", f"a zero byte at offset {zero}"
    try:
        return raw.decode(), ""
    except UnicodeDecodeError as error:
        if cut and error.start >= len(raw) - 3:
            return raw[: error.start].decode(), ""
        return "", f"byte {raw[error.start]:#04x} at offset {error.start}"
