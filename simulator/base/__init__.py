"""Base: quantities with units, errors that list every fault, and the strict base of every file that a person writes."""
