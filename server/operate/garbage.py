"""When the server's garbage is collected: rarely, and never where nothing ends.

A full collection looks at every object there is, and the loop waits for it: 40 ms for the 170,000 that a server holds
without a request, 390 ms beside 2,000 of them (two busy cores of an EPYC), each time a quarter more has come to stay.
Requests leave next to no cycles behind, so what they hold goes when its last reference does.
"""

from __future__ import annotations

import gc
import sys

YOUNG = 5_000  # allocations, less what was freed, between two collections of what is new: a millisecond
MIDDLE = 10  # of these, between two of what has outlived one
OLD = 20  # of these, between two of everything: a million objects


def settle() -> None:
    """What is there now is there for good: leave it out of every collection. To be called when all is loaded.

    Not where the device is in this process: a model that changes its mode lets go of its weights, in cycles too.
    """
    if "torch" in sys.modules:
        return
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)


def let_go() -> None:
    """A model was unloaded that was there for good: it is collected with all that is, as soon as no request waits."""
    if gc.get_freeze_count():
        gc.unfreeze()


def collect_when_idle() -> None:
    """Collect what the last requests left, while no request waits for it; and what was let go, for which all is."""
    if gc.get_threshold()[0] != YOUNG:  # nothing was settled
        return
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
    elif any(gc.get_count()[1:]):
        gc.collect()
