"""Software: what a stack does with a device, and how NCCL is set up."""
