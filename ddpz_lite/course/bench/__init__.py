"""Time of a training step next to that of PyTorch and DeepSpeed: `ddpz bench`.

This measures speed, which other work on the machine changes, so it is not a test.
"""
