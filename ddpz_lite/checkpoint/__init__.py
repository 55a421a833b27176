"""Checkpoints: saved at any stage and world size, loaded at any other. In the order to read:

save_load   what is saved and how it is loaded
parts       the ranges of each parameter that this rank holds, for every stage
folder      a new folder per save, and one rename that makes it count
files       the contents of the files
all_ranks   an error on one rank becomes an error on all
background  save in a thread while training continues
full_state  the plain module's state dict, from and to any stage
full_optimizer  the plain optimizer's state dict, by name, from and to any stage
averaged    an average of the weights, on shards
"""
