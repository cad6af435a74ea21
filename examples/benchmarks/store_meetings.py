"""Time that the Store takes for all ranks to compare one forward or backward at its first use.

Every rank's operations go through one connection, one after the other: an upper bound of the time
of the server, which the ranks' own connections share. Polls of ranks that wait are left out.

    python examples/benchmarks/store_meetings.py --ranks 64 512 4096
"""

from __future__ import annotations

import argparse
import statistics
import time
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from graphshard.runtime.meetings import Meetings

DIGEST = "1/1152921504606846975"


def seconds_of_one(store: TCPStore, ranks: int, turns: int) -> list[float]:
    """The time of each of `turns` meetings of `ranks` ranks, the first of which deletes nothing."""
    part = PrefixStore(f"{ranks}", store)
    meetings = [Meetings(part, rank, ranks, timeout=60.0) for rank in range(ranks)]
    seconds = []
    for turn in range(turns):
        begin = time.perf_counter()
        for meeting in meetings:
            meeting.arrive(turn, DIGEST)
        for meeting in meetings:
            assert meeting.leave(turn) == [False] * ranks
        seconds.append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--turns", type=int, default=5, help="meetings, one after the other")
    args = parser.parse_args()
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=60))
    print("| ranks | time of one meeting | time per rank | keys left |")
    print("|---|---|---|---|")
    for ranks in args.ranks:
        before = store.num_keys()
        seconds = statistics.median(seconds_of_one(store, ranks, args.turns))
        left = store.num_keys() - before
        print(f"| {ranks:,} | {seconds:.3f} s | {1e6 * seconds / ranks:.0f} us | {left} |")


if __name__ == "__main__":
    main()
