"""NL2RepoBench tasks: whole packages from a specification, tested by their own tests."""
