"""From recorded calls to trees, ranked trajectories, and sealed groups of samples."""
