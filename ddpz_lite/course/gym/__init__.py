"""The interview gym: questions and statements, each with its answer and the cells that settle it.

bank        the cards: what is asked, what a good answer says, and its source; also in Chinese
proofs      where the lessons prove or show a card, as the cells' own metadata say
deck        what a learner knows of each card, and when it is due: kept from day to day
session     cards one after the other: write first, then see the answer, then say how it went
plan        the days up to an interview, and what each brings
interview   twelve cards, drawn by topic and weakness, timed, with a report
notebook    the same as a widget, for lesson 17
gallery     lines of code in a process of their own, and what they raise
listings    names of libraries that the course does not install, from their own files

bank/*.toml are made to be read. A card's id is Q and a number; M for a myth, V for what is
true.
"""
