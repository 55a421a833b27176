"""Context parallelism: one sequence on several ranks, each of which has some of its tokens.

order       which tokens a rank has: a chunk, or the two of a zigzag
partial     attention to some of the keys, and how two such results become one
rotation    keys and values of the other ranks: around a ring, or all at once
heads       all tokens of some heads, by all-to-all (Ulysses)
attention   these three as one autograd function each; `context_parallel` puts them into a GPT
"""
