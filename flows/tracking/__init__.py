"""Figures of a run for trackers of experiments."""
