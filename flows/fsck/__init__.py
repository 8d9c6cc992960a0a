"""What a run has in storage, held against itself."""
