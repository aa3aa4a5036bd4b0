"""Recorded programs: one step of a real run as a profiler saw it, as a StepScript whose ops have measured times."""
