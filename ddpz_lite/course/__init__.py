"""The course around the library: exercises and their judges, figures, the gym, the `ddpz` command.

Nothing outside of this package imports from it.

check      what a task is, how an answer is observed, and what it is worth
tasks      the tasks of the exercises, one folder per lesson
grader     a class: hand-ins are run in a sandbox and never believed
show       figures, widgets, quizzes and predictions
gym        interview questions and myths, with the cells that prove them
zoo        the twenty bugs of lesson 15c
built      what a lesson's cells built, for the notebook that continues it
authoring  map, links and rules of form, from the notebooks; the learners' copies
bench      measurements: a training step next to its peers, what users wait for
cli        the `ddpz` command
"""
