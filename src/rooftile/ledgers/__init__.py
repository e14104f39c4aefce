"""Memory, traffic, precision, KV cache and communication, from a Trace."""
