"""Data that ships with the package: clusters, devices, software stacks and calibrations, each number with its source."""
