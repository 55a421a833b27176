"""Random inputs that are a secret: they cannot be computed from what a rank is given."""

from __future__ import annotations

import hashlib
import struct

import torch

WORDS = struct.Struct("<624Q")  # in the state of torch's generator, after a head of 24 bytes
HEAD = 24


def generator(key: str) -> torch.Generator:
    """A generator whose whole state follows from the key.

    A seed will not do: torch keeps 32 bits of it, few enough for an answer to try them until one
    gives the inputs that it has, and so those of all ranks.
    """
    rng = torch.Generator().manual_seed(0)
    state = bytearray(rng.get_state().numpy().tobytes())
    digest = hashlib.shake_256(key.encode()).digest(4 * 624)
    WORDS.pack_into(state, HEAD, *struct.unpack("<624I", digest))
    return rng.set_state(torch.frombuffer(state, dtype=torch.uint8))


def apart(rng: torch.Generator) -> torch.Generator:
    """A generator for one rank's long inputs; the next one differs.

    From 624 of its numbers torch's generator can be solved, so nothing of `rng` may follow from
    them.
    """
    torch.rand(1, generator=rng)
    return generator(hashlib.sha256(rng.get_state().numpy().tobytes()).hexdigest())
