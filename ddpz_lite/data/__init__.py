"""Real text to train on, and a sampler that deals one data set to many ranks."""

from ddpz_lite.data.sampler import RankSampler
from ddpz_lite.data.text import Corpus, Windows, corpus

__all__ = ["Corpus", "RankSampler", "Windows", "corpus"]
