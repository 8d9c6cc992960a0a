"""Agent programs. Each runs as its own process and knows a model only by its base URL."""
