"""The ways in which clients speak, one module each, over the one internal form."""
