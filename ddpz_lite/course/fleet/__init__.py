"""A fleet of GPUs as a model: how much of its time counts when machines fail, and which mesh.

`events.py` simulates a job of many nodes through its failures: saves, detection, spares, restarts.
`plan.py` predicts the step time and the memory of a mesh. Both are models, and the lessons say
which of their inputs are assumed.
"""
