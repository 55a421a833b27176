"""Checkpoints: saved at any stage and world size, loaded at any other.

save_load   what is saved and how it is loaded: start reading here
parts       which slice of each parameter this rank holds, for every stage
full_state  the plain module's state dict, out of any stage and into it
background  a save that continues in a thread while training goes on
files       the files' contents; `folder`, which of them count
agreement   an error on one rank becomes an error on all
"""
