"""What the laboratory knows of each method: its candidates in benchmarks, and predictions of a step with it."""
