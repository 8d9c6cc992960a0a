"""Architectures that SGLang finds without importing all of its models (SGLang reads this package
through ``SGLANG_EXTERNAL_MODEL_PACKAGE``; others are still found, at the price of that import)."""
