"""Spec: the inputs. Models, plans, clusters, software, calibrations, prices."""
