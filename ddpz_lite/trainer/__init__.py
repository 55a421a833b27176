"""The trainer behind `ddpz train`: the course's loop, with what a real run needs.

In the order to read:

loop            the loop itself
recipe          all options and their defaults, without torch
batches         the text as this rank's micro-batches
log             lines, losses, TensorBoard's scalars
saving          checkpoints: write, keep the last two, resume from the newest good one
save_interval   how often to save: Young's formula, for `--save-every auto`
mesh            --mesh: the model over a pipeline and tensor parallelism
survivors       ranks that continue without one that died: --survive, and for other loops
"""
