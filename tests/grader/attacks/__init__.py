"""Submissions of people who want points without the work, by the classes of the design.

`cells` are answers that attack while they run; `files` are notebooks, folders and zips that attack
while they are read. Each says what must come of it.
"""
