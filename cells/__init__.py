"""Blocks of GPUs (or CPU cores) and what runs on them."""
