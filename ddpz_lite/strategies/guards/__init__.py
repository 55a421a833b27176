"""What the strategies refuse, and what they watch for; the algorithm can be read without it.

elementwise    optimizers that mix the elements of a parameter
model          models that cannot be wrapped: shared memory, hooks, parameters changed afterwards
optimizers     torch optimizers that step on parameters that no longer exist
parameters     reads and replacements of parameters in a module whose units come and go
param_groups   what `parallelize(param_groups=...)` returned
"""
