"""The fusion and compression core that all methods share: `torch` and `torch.distributed` only."""
