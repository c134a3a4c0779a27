"""The engine of gradients: averaged under the backward pass, applied to a bucket or a shard, all-gathered."""
