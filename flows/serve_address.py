"""Where flows learn the address of the pages that ``gyre serve`` shows."""

PAGES_URL = "GYRE_PAGES_URL"
"""Environment variable; the worker of ``gyre serve`` has it."""
