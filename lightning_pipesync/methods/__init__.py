"""The published methods, each as settings, a pure algorithm and a runtime."""
