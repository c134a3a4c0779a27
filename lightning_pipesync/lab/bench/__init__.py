"""Benchmarks on slow networks, compared with alternatives and with the theoretical limits."""
