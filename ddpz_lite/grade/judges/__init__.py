"""What never meets an answer: the tasks, the references they are compared with, the sentences.

lessonNN.py has TASKS, in the order of the exercise. In a grader's sandbox this folder is not
there.
"""
