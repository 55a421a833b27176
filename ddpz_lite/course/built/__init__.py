"""What lessons built, for the notebooks that go on with it.

A lesson's second notebook, or the next lesson, begins where the learner has written something. So
it stands here, word for word as in the cells of the lesson whose number the file has: the tests
compare the two. The versions to train with are in `ddpz_lite.strategies`.
"""
