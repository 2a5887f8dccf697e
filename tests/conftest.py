"""Settings that must be in place before anything starts.

A spinning OpenMP pool beside an event loop costs 100x, and torch reads its policy once. What a served engine writes for
its user (recordings of faults) goes to a folder that is gone afterwards.
"""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_state = tempfile.mkdtemp(prefix="novainfer-tests-")
os.environ["XDG_STATE_HOME"] = _state
atexit.register(shutil.rmtree, _state, ignore_errors=True)
