"""What holds for every test: the rule about skips, no network, no deadline on slow machines."""

from __future__ import annotations

import os

from hypothesis import settings

pytest_plugins = ["tests.skips"]

# Set before anything is imported: all of it is read at import.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads than cores are many times slower
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")

# On CI the same examples each time: a new one is for whoever runs the tests by hand to find.
in_ci = bool(os.environ.get("CI"))
settings.register_profile("gyre", deadline=None, max_examples=60, derandomize=in_ci)
settings.load_profile("gyre")
