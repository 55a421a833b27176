"""Code from the cells of lessons, for the notebooks that continue it.

`make course` generates these modules (see ddpz_lite/course/authoring/built.py). The versions to
train with are in `ddpz_lite.strategies`.
"""
