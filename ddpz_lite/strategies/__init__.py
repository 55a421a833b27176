"""DDP and ZeRO 1 to 3, in the order in which to read them.

placement    the table: where parameter, gradient and optimizer state are, by stage
comm         the four transitions, and which collective serves each
ddp          stage 0: `reducer`, buckets of gradients; `replica`, the same module on every rank
flat         parameters end to end in one buffer, so that one transition moves them; `layout`
optim        a torch optimizer on this rank's shards; `wrapped_optimizer`, the rest of its interface
zero1        the optimizer's state is sharded
zero2        gradients too: the reducer of ddp with the buffers of zero1
units        what ZeRO-3 unshards at a time; `unit_choice`, which modules; `prefetch`, the order
zero3        parameters too; `forwards`, the mechanics of calls around a module
precision    16 bits for compute, master copies for the step, the loss scale of fp16
clip         the norm of a gradient that lies on several ranks
parallelize  one function for all of them

gradient     what `param.grad` is, and what torch's clipping and GradScaler make of it
parameters   parameters that show `.grad` so
groups       which ranks hold a model together; `across`, where replicas cut a shard once more
costs        bytes held and elements sent, from the table
quantised    8 bits; `hooks`, what a bucket may send in place of all its bits
local        ranks that meet every H steps
pipeline/    stages on ranks, micro-batches through them
tensor/      attention and MLP split over ranks; `mesh`, what follows for norms and checkpoints
context/     one sequence split over ranks: ring, all-gather, all-to-all
meta_device  models built unit by unit
guards/      what is refused, and what is watched for
"""
