"""What every framework's adapter needs, once, and free of any framework."""
