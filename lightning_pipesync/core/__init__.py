"""Transport, tensor fusion and compression, which all methods share. Depends on torch alone."""
