"""The same plans on real devices: measure, fit a calibration, compare. torch is imported only by the files that measure."""
