"""Spec: what is asked. Models, plans, clusters, software, calibrations, prices."""
