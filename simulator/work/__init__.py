"""Work: what a step does. Ops and kernels of a block, what travels between ranks, programs and their traces."""
