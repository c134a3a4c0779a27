"""What users run before they pay for a cluster: emulated networks, benchmarks and plans."""
