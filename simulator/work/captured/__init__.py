"""Captured programs: a step of a user's own program, as kernels and as a StepScript."""
