"""Which ranks share a host: those between which the loopback device moves bytes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from graphshard.runtime.group import Group


def hosts_by_rank(group: Group) -> list[str]:
    """A name of each rank's host, in rank order; every rank must call this at the same point."""
    return group.all_gather_object(os.environ.get("NCCL_HOSTID") or _this_host())


def number_of_hosts(group: Group) -> int:
    """The number of hosts of the ranks of `group` that Gloo connects; 1 for other backends."""
    return len(set(hosts_by_rank(group))) if group.backend == "gloo" else 1


def _this_host() -> str:
    """The host's name and, on Linux, its boot and its network, which containers may share."""
    name = [socket.gethostname()]
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    if boot.exists() and network.is_symlink():
        name += [boot.read_text().strip(), str(network.readlink())]
    return " ".join(name)
