"""One program for each make target check-* and bench-*. They may import everything; nothing imports them."""

from __future__ import annotations

import os

# Before anything loads OpenMP; the workers do the same, see worker/service.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
