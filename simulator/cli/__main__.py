"""`python -m simulator.cli` is `shardwise`."""

import sys

from simulator.cli import main

sys.exit(main())
