"""The trainer behind `ddpz train`: the course's loop, with what a real run needs around it.

recipe    all options and their defaults, free of torch
batches   the text as this rank's micro-batches
mesh      --mesh: the model over a pipeline and tensor parallelism
saving    checkpoints: write, keep the last two, resume from the newest good one
interval  how often to save: Young's formula, for `--save-every auto`
survivors ranks that go on without one that has died: --survive, and loops of your own
log       lines, losses, TensorBoard's scalars
loop      the loop itself: start reading here
"""
