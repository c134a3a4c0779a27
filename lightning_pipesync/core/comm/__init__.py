"""Carries communication between ranks: collectives over Gloo and NCCL, wire formats, one queue."""
