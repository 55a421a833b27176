"""Exercises: what is asked, what an answer did, and what that is worth.

One rule holds for the package: the process that runs an answer returns data, never verdicts, and
the process that judges never runs an answer.

task       what a task is: cases, criteria, points, hints
job        finds and runs what stands next to an answer, in its process, and returns data
watch      what those jobs observe: bytes held, inputs changed, layouts
vocabulary what judges of several lessons say and compute
data       tensors and numbers over the boundary, and nothing else
compare    two tensors, and one sentence on how they differ
score      from what was observed to points
run        cases on ranks of this machine, for the one who learns
together   many answers in one launch
check      `check("03.weighted_mean", weighted_mean)` in a notebook
progress   what a learner has solved, from day to day
notebooks  exercises/ from solutions/
guard      ready-made strategies are refused while an answer runs
chance     generators of random numbers from a seed
"""
