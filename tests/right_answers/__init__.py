"""Right answers in another style than the solutions': each gets full points, too.

lessonNN.py has RIGHT: task id -> list of (what is different, the answer cell).
"""
