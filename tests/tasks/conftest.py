"""Settings of the property tests: the machine is shared, so no test fails by the clock."""

from hypothesis import settings

settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
