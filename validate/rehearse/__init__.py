"""A rehearsal of a cluster on one machine: eight ranks of two "nodes" on gloo, with faults; each must be named.

Launchers are stood in for: processes get torchrun's or srun's variables and are forked from one that has loaded torch,
so that a job of sixteen processes costs seconds. Nothing of a job may be left when it has ended.
"""
