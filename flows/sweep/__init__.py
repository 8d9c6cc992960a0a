"""Sweeps: the same training with some settings varied, each point with several seeds."""
