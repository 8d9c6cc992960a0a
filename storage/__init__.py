"""The truth of what happened in a run, in any store that fsspec reaches."""
