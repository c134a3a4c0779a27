"""The papers' experiments: their baselines, networks, pipelines and emulated hosts. Apart from what users run."""
