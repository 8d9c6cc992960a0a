"""The built-in source: specifications of small packages with hidden tests."""
