"""Pipeline parallelism: stages on ranks, micro-batches through them.

schedules         who computes what when; GPipe, 1F1B, interleaved 1F1B, ZB-H1
pipeline          runs a schedule on this rank's stages
messages          activations and gradients between neighbouring stages
gpt_stages        a GPT cut into stages
ties              one parameter on two stages, as a tied embedding is
weight_gradients  backward in two halves, for zero-bubble schedules
"""
