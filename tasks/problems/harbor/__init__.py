"""Harbor tasks: the format of Terminal-Bench 2 and DeepSWE."""
