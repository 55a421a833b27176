"""What the strategies refuse, and what they watch for; the algorithm can be read without it.

elementwise    optimizers that mix the elements of a parameter
model          models that cannot be wrapped: shared memory, hooks, parameters changed afterwards
modules        parameters that are replaced after wrapping; outputs that no gradient reaches
optimizers     torch optimizers that step on parameters that no longer exist; another rank's state
parameters     reads and replacements of parameters in a module whose units come and go
param_groups   what `parallelize(param_groups=...)` returned
"""
