"""Run ranks on hosts that are network namespaces of this machine, with a link as slow as asked.

    python examples/benchmarks/two_hosts.py --rate 1gbit -- \\
        examples/benchmarks/rivals.py --models gpt-512 --scale 4 --dtypes fp32 --eager --pairs 12

The hosts are joined by a bridge; what each sends passes a token bucket of `--rate` (tc's tbf), so
bytes take their time while the cores compute, in both directions at once. Each host has its share
of the cores and one torchrun with `--per-host` ranks. The output is that of rank 0. It needs root,
iproute2 and a kernel with namespaces and tbf; where one is missing it says so and ends with 2.

Between the hosts TCP is this machine's: it takes time of the cores, and no packet is lost. FSDP2
has no side streams on CPUs, so it hides no communication there, and Gloo's reduce_scatter sends
twice the bytes that are needed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
NETWORK = "10.99.7"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit", help="of tc, or none (default: 1gbit)")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=1, metavar="RANKS")
    parser.add_argument("command", nargs="+", help="a script and its arguments, behind --")
    return parser.parse_args()


def run(*command: str) -> None:
    """Run a command; its output is shown if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


def link_of(name: str) -> str:
    """The network device of a host, by the name of its namespace."""
    mark, _, host = name.removeprefix("gs").partition("h")
    return f"gsi{mark}{host}"


def bucket(rate: str) -> tuple[str, ...]:
    """The queue of a link that sends at `rate`, in the words of tc."""
    return "tbf", "rate", rate, "burst", "256kb", "latency", "100ms"


@contextmanager
def namespaces(hosts: int, rate: str) -> Iterator[list[str]]:
    """The names of network namespaces, joined by a bridge and gone at the end."""
    mark = f"{os.getpid() % 100_000}"
    bridge, names = f"gsb{mark}", [f"gs{mark}h{host}" for host in range(hosts)]
    try:
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "link", "set", bridge, "up")
        for host, name in enumerate(names):
            inside, outside = link_of(name), f"gso{mark}{host}"
            run("ip", "netns", "add", name)
            run("ip", "link", "add", inside, "type", "veth", "peer", "name", outside)
            run("ip", "link", "set", inside, "netns", name)
            run("ip", "link", "set", outside, "master", bridge, "up")
            run("ip", "-n", name, "addr", "add", f"{NETWORK}.{host + 1}/24", "dev", inside)
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", inside, "up")
            if rate != "none":
                add = ("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", inside, "root")
                run(*add, *bucket(rate))
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def started(
    names: list[str], host: int, port: int, args: argparse.Namespace
) -> subprocess.Popen[bytes]:
    """torchrun on a host; what ranks of other hosts than the first print is dropped."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // args.hosts)
    own = cores[host * share : (host + 1) * share] or cores
    torchrun = (
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(args.hosts)),
        *("--node-rank", str(host), "--nproc-per-node", str(args.per_host)),
        *("--master-addr", f"{NETWORK}.1", "--master-port", str(port)),
    )
    pinned = ("taskset", "-c", ",".join(map(str, own)))
    return subprocess.Popen(
        ["ip", "netns", "exec", names[host], *pinned, *torchrun, *args.command],
        env={
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            **os.environ,
            "GLOO_SOCKET_IFNAME": link_of(names[host]),
        },
        stdout=None if host == 0 else subprocess.DEVNULL,
        stderr=None if host == 0 else subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )


def main() -> int:
    args = parse_args()
    lacking = [tool for tool in ("ip", "tc", "taskset") if shutil.which(tool) is None]
    if os.getuid() or lacking:
        print(f"namespaces need root and {', '.join(lacking) or 'iproute2'}", file=sys.stderr)
        return 2
    port = random.randint(20_000, 40_000)
    try:
        with namespaces(args.hosts, args.rate) as names:
            ranks = [started(names, host, port, args) for host in range(args.hosts)]
            return max(abs(one.wait()) for one in ranks)
    except RuntimeError as error:
        print(f"there can be no hosts here: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
