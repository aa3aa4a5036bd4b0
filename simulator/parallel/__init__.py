"""Parallel: which rank does what. The mesh, the model shard of each rank, group layouts, pipeline schedules."""
