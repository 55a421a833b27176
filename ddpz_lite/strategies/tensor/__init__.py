"""Tensor parallelism: one layer on several ranks.

layers      column- and row-parallel linear layers; `tensor_parallel` puts them into a GPT
functions   the collectives of these layers, as autograd functions
sequence    what is computed between the layers, split along the sequence
vocabulary  embedding and loss, split along the vocabulary
masks       dropout masks that agree where the ranks hold the same values
"""
