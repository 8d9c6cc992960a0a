"""Whether this machine, its environment and a storage root can carry a run, and what to do."""
