"""Data order and data exchange: SelDP, label-skewed partition, data injection."""
