"""Verdicts: what a frozen workspace is worth, or why that is not known."""
