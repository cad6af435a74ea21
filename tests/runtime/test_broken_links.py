"""A link between two hosts that fails while ranks train: hosts are namespaces of this machine."""

from __future__ import annotations

import datetime
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from paths import ROOT, SUPPORT

import graphshard
from examples.benchmarks.two_hosts import NETWORK, bucket, link_of, namespaces, run
from examples.gpt import GPT, Block, GPTConfig

# -- a rank that trains while its link fails, and saves meanwhile ----------------------------------


SAVED = 6
PATIENCE = 8  # seconds after which ranks that wait for a lost link give up
CONFIG = GPTConfig(64, layers=2, heads=4, width=192)


def compiled(seed: int) -> graphshard.ShardedModule:
    torch.manual_seed(seed)
    return graphshard.compile(GPT(CONFIG), graphshard.BlockPolicy({Block}))


def main(folder: Path, steps: int) -> None:
    """Train, with a line in FOLDER/rankR.txt for each step.

    A checkpoint is written in the background from step SAVED on; at the end what it holds is
    compared with the parameters of that step.
    """
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE))
    rank = dist.get_rank()
    sharded = compiled(0)
    optim = torch.optim.AdamW(sharded.parameters())
    generator = torch.Generator().manual_seed(rank)
    saving, kept = None, {}
    with (folder / f"rank{rank}.txt").open("w") as said:
        for step in range(steps):
            if step == SAVED:
                saving = sharded.save_checkpoint(folder / "saved", optim, background=True)
                kept = {name: part.clone() for name, part in sharded.local_state_dict().items()}
            ids = torch.randint(64, (2, 33), generator=generator)
            loss = sharded(ids[:, :-1], ids[:, 1:])
            loss.backward()
            optim.step()
            optim.zero_grad()
            print(step, loss.item().hex(), file=said, flush=True)
    assert saving is not None
    saving.result()
    other = compiled(1)
    other.load_checkpoint(folder / "saved", torch.optim.AdamW(other.parameters()))
    for name, part in other.local_state_dict().items():
        torch.testing.assert_close(part, kept[name], rtol=0, atol=0)
    dist.destroy_process_group()


# -- tests -----------------------------------------------------------------------------------------


pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RATE = "400mbit"
CUT = 3.0
UNIT_COLLECTIVE = r"in (for|back)ward failed on rank \d"
AGREEMENT = r"rank \d of 2 (calls|is about to begin) "  # before a forward or a backward


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    if os.getuid() or any(shutil.which(tool) is None for tool in ("ip", "tc")):
        pytest.skip("network namespaces need root and iproute2")
    try:
        with namespaces(2, RATE) as names:
            yield names
    except RuntimeError as error:
        pytest.skip(f"no network namespaces here: {error}")


def queue(host: str, *discipline: str) -> None:
    """Give what `host` sends another queue."""
    device = ("dev", link_of(host), "root")
    run("ip", "netns", "exec", host, "tc", "qdisc", "replace", *device, *discipline)


def down(host: str) -> None:
    run("ip", "-n", host, "link", "set", link_of(host), "down")


def one_way(host: str) -> None:
    """Drop all that `host` sends; what is sent to it arrives."""
    queue(host, "bfifo", "limit", "1")


def slow(host: str) -> None:
    queue(host, *bucket("40mbit"))


def mend(host: str) -> None:
    run("ip", "-n", host, "link", "set", link_of(host), "up")
    queue(host, *bucket(RATE))


class Ranks:
    """A rank on each host, which trains, says each step in a file, and saves in the background."""

    def __init__(self, hosts: list[str], folder: Path, steps: int) -> None:
        self.folder = folder
        port = random.randint(20_000, 40_000)
        self.processes = [
            subprocess.Popen(
                [
                    *("ip", "netns", "exec", host, sys.executable),
                    *(__file__, str(folder), str(steps)),
                ],
                env={
                    **os.environ,
                    "PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}",
                    "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": link_of(host),
                    "MASTER_ADDR": f"{NETWORK}.1",
                    "MASTER_PORT": str(port),
                    "WORLD_SIZE": "2",
                    "RANK": str(rank),
                },
                stderr=(folder / f"rank{rank}.err").open("w"),
            )
            for rank, host in enumerate(hosts)
        ]

    def said(self, rank: int = 0) -> list[str]:
        file = self.folder / f"rank{rank}.txt"
        return file.read_text().splitlines() if file.exists() else []

    def reach(self, step: int) -> None:
        """Wait until both ranks have taken `step` steps."""
        while min(len(self.said(rank)) for rank in range(2)) < step:
            assert all(process.poll() is None for process in self.processes), self.errors()
            time.sleep(0.01)

    def end(self) -> list[int]:
        """The exit codes."""
        try:
            return [process.wait(120) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()

    def errors(self) -> list[str]:
        return [(self.folder / f"rank{rank}.err").read_text() for rank in range(2)]


@pytest.fixture(scope="module")
def undisturbed(hosts: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    ranks = Ranks(hosts, tmp_path_factory.mktemp("undisturbed"), 30)
    assert ranks.end() == [0, 0], ranks.errors()
    return ranks.said()


@pytest.mark.parametrize("failure", [down, one_way, slow])
def test_training_goes_on_when_the_link_returns(
    failure: Callable[[str], None], hosts: list[str], undisturbed: list[str], tmp_path: Path
) -> None:
    ranks = Ranks(hosts, tmp_path, 30)
    ranks.reach(8)
    failure(hosts[1])
    time.sleep(CUT)
    mend(hosts[1])
    assert ranks.end() == [0, 0], ranks.errors()
    assert ranks.said() == undisturbed


@pytest.mark.parametrize("failure", [down, one_way])
def test_every_rank_says_what_it_waited_for_when_the_link_does_not_return(
    failure: Callable[[str], None], hosts: list[str], tmp_path: Path
) -> None:
    ranks = Ranks(hosts, tmp_path, 10_000)
    ranks.reach(8)
    failure(hosts[1])
    try:
        start = time.monotonic()
        assert all(code != 0 for code in ranks.end())
        assert time.monotonic() - start < 3 * PATIENCE
        for error in ranks.errors():
            assert "graphshard.errors.CollectiveError: " in error
            assert re.search(UNIT_COLLECTIVE + "|" + AGREEMENT, error), error
            assert f"did not get here within {PATIENCE} s" in error
    finally:
        mend(hosts[1])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
