"""Addresses of hosts, and of what listens there, as ``host:port``; an IPv6 address is in brackets there."""

from __future__ import annotations

import socket


def split_address(address: str) -> tuple[str, int]:
    """Returns host, without brackets, and port of ``host:port``."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_address(host: str, port: int, family: int = socket.AF_UNSPEC) -> str:
    """Returns the address at which others reach this host: that of its interface towards ``host``."""
    found, kind, _, _, address = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0]
    with socket.socket(found, kind) as probe:
        probe.connect(address)  # sends nothing
        own: str = probe.getsockname()[0]
    return own
