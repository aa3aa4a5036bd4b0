"""`shardwise calibrate burn-in`: the same work over and over, each result compared with what it must be."""
