"""The tasks of the exercises, a folder a lesson, found by their folders.

lessonNN/job.py     runs next to an answer, in its process: hands over inputs and returns data
lessonNN/judge.py   never meets an answer: the cases, the references, the sentences; has TASKS

How a judge is written (lesson 09 is the model; no lesson imports from another):

1. The text promises, the judge looks. Where the text is silent, decide, and let the text say it.
   tests/answers/lessonNN.py has PROMISES: words of the text -> the criterion and the kind of case.
2. Cases: worlds 1 to 4 (8 where it is cheap), the one that finds most mistakes first, for criteria
   pull cases in order and a wrong answer costs one. Sizes such that every formula has another
   value in another world, and for a neighbour off by one: no world divides a sum, no two equal.
   Then what the text lets in: another dtype, views, frozen, no gradient, nothing at all, one unit.
3. The job calls the answer again: a third step, a second instance with other shapes, both in turn.
   It returns data of all calls. `check.watch` observes: `Holding` counts bytes, whatever holds
   them, between calls and at the peak, `Kept` names inputs that were changed, `form` tells layouts.
4. A criterion is one property, and worth a point or more. Its judge is a function from what was
   observed to a sentence or None, made of `check.vocabulary`: values are explained by the mistake
   that gives them, traffic is bytes, calls and their order, memory is bytes.
   It judges by what the text asks: with one rank nothing needs to be sent; a sum may be a product
   of matrices; an answer that sends less, or earlier, or as functional collectives, is right.
   What it compares must not depend on the draw.
5. `python -m answers NN` (in tests/) runs all wrong and right answers of a lesson;
   with --mutants it makes mutants of the solutions instead. A mutant that survives is a
   hole in the judge, or is right: then it stands in EQUIVALENT of the answers, with the reason.
"""
