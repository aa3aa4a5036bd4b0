"""From samples to a calibration: robust fits of the simulator's own curves, and how sure each coefficient is."""
