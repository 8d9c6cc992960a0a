"""The first policy: a tokenizer and a small model fitted to scripted demonstrations."""
