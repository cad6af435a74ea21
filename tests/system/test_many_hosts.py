"""The files for SLURM and Kubernetes start one run on two hosts: agents on this machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

yaml = pytest.importorskip("yaml")
FILES = ROOT / "examples" / "many_hosts"
OPTIONS = ["--steps", "3", "--every", "2", "--batch", "4"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def environment(tools: Path, **variables: str) -> dict[str, str]:
    """This process's, with torchrun and `tools` in front of its path, and `variables`."""
    tools.mkdir(exist_ok=True)
    torchrun = tools / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **variables}


def losses(said: str) -> list[str]:
    assert "4 ranks begin at step 0" in said
    return re.findall(r"^step \d+ .*", said, re.MULTILINE)


def test_a_job_of_slurm(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    where = environment(
        tools,
        SLURM_NNODES="2",
        SLURM_GPUS_ON_NODE="2",
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="node[1-2]",
        PORT=free_port(),
    )
    # srun starts a command on each node, and scontrol says their names.
    (tools / "scontrol").write_text("#!/bin/sh\nprintf '127.0.0.1\\n127.0.0.2\\n'\n")
    (tools / "srun").write_text('#!/bin/sh\n"$@" & first=$!\n"$@" && wait $first\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    command = ["bash", str(FILES / "slurm.sbatch"), str(tmp_path / "run"), *OPTIONS]
    ended = subprocess.run(command, cwd=ROOT, env=where, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert len(losses(ended.stdout)) == 3


def test_a_job_of_kubernetes(tmp_path: Path) -> None:
    job = yaml.safe_load((FILES / "pytorchjob.yaml").read_text())
    pods = job["spec"]["pytorchReplicaSpecs"]
    assert [pods[kind]["replicas"] for kind in ("Master", "Worker")] == [1, 1]
    (container,) = pods["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])
    *command, folder = container["command"]
    assert folder.startswith(container["volumeMounts"][0]["mountPath"])
    where = environment(
        tmp_path / "tools",
        PET_NNODES="2",
        PET_NPROC_PER_NODE="2",
        PET_MASTER_ADDR="127.0.0.1",
        PET_MASTER_PORT=free_port(),
    )
    agents = [
        subprocess.Popen(
            [*command, str(tmp_path / "run"), *OPTIONS],
            cwd=ROOT,
            env={**where, "PET_NODE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [agent.communicate()[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0]
    assert len(losses(said[0])) == 3
