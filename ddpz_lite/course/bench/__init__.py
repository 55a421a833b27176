"""What things take on this machine: `ddpz bench`.

`steps` is a training step beside that of PyTorch and DeepSpeed, `felt` what users wait for, each
beside its target, and `growth` how time and memory grow with ranks, parameters, submissions and
records. All are measurements, not tests: a neighbour on the machine raises them, and nobody's tests
fail.
"""
