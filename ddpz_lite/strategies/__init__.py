"""DDP and ZeRO 1 to 3: `parallelize` is the door, `placement` the table that they follow.

comm         the four transitions, and the only module that calls a collective
flat         parameters end to end in one buffer, so that one transition moves them all
replica      a module that is the same on every rank
reducer      buckets of gradients, and when a bucket goes
ddp          the two together
hooks        what a bucket may send in place of all its bits; `local`, ranks that meet now and then
units        what ZeRO-3 gathers at a time; `schedule`, in which order
zero1-3      optimizer state, then gradients, then parameters in shards
optim        the optimizer of every stage: a torch optimizer on this rank's pieces
gradient     what a script sees of a gradient in shards, and does to it before the step
precision    16 bits for compute, masters for the step, the loss scale of fp16
clip         the norm of a gradient that lies on several ranks
pipeline     stages on ranks, micro-batches through them, schedules as data
tensor       attention and MLP cut over ranks; `mesh`, what follows for norms and checkpoints
parts        what a rank has of each parameter: the same for all stages
full_state   the plain module's state dict, out of any stage and into it
checkpoint   saved at any stage and world, loaded at any other; `checkpoint_files`, what its files
             hold; `checkpoint_folder`, which of them count; `checkpoint_background`, in a thread
agreement    a step that all ranks take or none
parallelize  one door to all of them
"""
