"""Who takes part, who is lost, and who is to blame."""
