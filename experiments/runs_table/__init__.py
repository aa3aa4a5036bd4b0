"""What the published tables of runs mean by their columns and notes: read by `convert_runs.py`, by nobody else."""
