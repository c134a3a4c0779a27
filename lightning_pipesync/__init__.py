"""Fast distributed training on networks slower than the accelerators."""
