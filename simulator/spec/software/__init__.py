"""Software: stacks (framework, kernels, coefficients) and NCCL's configuration."""
