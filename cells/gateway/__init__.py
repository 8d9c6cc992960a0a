"""The proxy between harnesses and engines: exact tokens in, exact tokens out, all recorded."""
