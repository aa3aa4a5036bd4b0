"""Parallel: who does it. The mesh, what each rank holds of a model, where ranks sit, pipeline schedules."""
