"""The tasks of the exercises, a folder a lesson; whoever asks finds them by their folders.

lessonNN/job.py     runs beside an answer, in its process: hands over inputs and returns data
lessonNN/judge.py   never meets an answer: the cases, the references, the sentences; has TASKS
"""
