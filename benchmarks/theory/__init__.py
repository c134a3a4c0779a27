"""Cost models and convex problems of which the papers' bounds are known."""
