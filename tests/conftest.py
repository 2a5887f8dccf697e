"""Settings that must be in place before torch is loaded: a spinning OpenMP pool beside an event loop costs 100x."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
