"""The course as its authors make it: what follows from the notebooks, and what a lesson must have.

catalogue   the lessons, as the folder and the notebooks' metadata say
pages       the map, the tables, the sums and the links, which are not written by hand
start       what a notebook says where the course is not installed
glossary    its entries, and what is wrong with them
rules       the form of a lesson, each rule a function that yields what is wrong
copies      the learner's own copies in my/, which are kept and brought up to date
skeleton    the files of a new lesson with one task
authoring   what a lesson still lacks, in one list
"""
