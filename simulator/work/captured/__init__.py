"""Captured programs: a step that somebody's own program made, as kernels and as a StepScript."""
