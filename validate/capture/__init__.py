"""Capture: run a user's own training program on fake CUDA tensors and write down what one step of it does.

`command` is the parent (no torch), `child` the process that runs the program; `docs/guides/capture.md` says how to use it.
"""
