"""Replicas as jobs of their own: their launcher, and the lighthouse at which they meet."""
