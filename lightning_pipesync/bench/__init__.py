"""Measurements on slow networks, beside what a user would pick instead and what theory allows."""
