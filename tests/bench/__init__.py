"""Measurements of the whole course on this machine: `make bench-targets`, `make bench-growth`.

`targets` measures what users wait for, each next to the most that it should take, and `growth` how
time and memory grow with ranks, parameters, submissions and records. They measure speed, so none of
them is a test. The tests here only check that each measurement runs.
"""
