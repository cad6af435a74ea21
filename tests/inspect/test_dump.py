"""The files of a dump: complete, stable, valid in their languages, and true to the program."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import networkx as nx
import pytest
import torch
from paths import ROOT, SUPPORT
from torch import fx, nn

import graphshard
from graphshard.cli.main import main
from graphshard.inspect.dump import dot_text, dump_program, graph_source, schedule_graph

FILES = ["schedule.txt", "program.txt", "forward.py", "backward.py", "plan.json", "schedule.dot"]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return (x * self.scale).square().mean()


def planned(world_size: int, model: nn.Module | None = None) -> graphshard.ShardingPlan:
    policy = graphshard.BlockPolicy({Layer})
    inputs = (torch.ones(4, 8),)
    return graphshard.plan(model or Net(), policy, world_size=world_size, example_inputs=inputs)


def load(path: Path) -> ModuleType:
    """Import a dumped file, its communication bound to that of a single rank."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    alone: dict[str, Callable[..., Any]] = {
        "all_gather": lambda shards, unit, params: list(shards),
        "reduce_scatter": lambda grads, unit, params: list(grads),
        "all_reduce": lambda grads, unit, params: list(grads),
        "wait": lambda pending: pending,
        "free": lambda gathered: None,
    }
    for name, function in alone.items():
        if hasattr(module, f"graphshard_ops_{name}"):
            setattr(module, f"graphshard_ops_{name}", function)
    return module


@pytest.fixture(scope="module")
def plan() -> graphshard.ShardingPlan:
    return planned(world_size=4)


def test_all_files_are_written_and_listed_and_nothing_else(
    plan: graphshard.ShardingPlan, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "folder"
    for _ in range(2):
        paths = dump_program(plan.program, plan, folder)
        assert paths == [folder / name for name in FILES]
        assert sorted(p.name for p in folder.iterdir()) == sorted(FILES)
        assert paths[0].read_text() == str(plan.program)
        assert json.loads(paths[4].read_text()) == plan.to_dict()
        paths[4].write_text("old and longer than nothing" * 10_000)


@pytest.mark.slow
def test_dumps_are_the_same_in_another_process(
    plan: graphshard.ShardingPlan, tmp_path: Path
) -> None:
    """Hash order and addresses differ between processes; the files must not."""
    script = (
        "import sys; sys.path[:0] = sys.argv[1:4]\n"
        "from test_dump import planned\n"
        "from graphshard.inspect.dump import dump_program\n"
        "plan = planned(world_size=4)\n"
        "dump_program(plan.program, plan, sys.argv[4])\n"
    )
    folders = [str(folder) for folder in (Path(__file__).parent, SUPPORT, ROOT)]
    subprocess.run(
        [sys.executable, "-c", script, *folders, str(tmp_path / "there")],
        env={"PYTHONHASHSEED": "1"},
        check=True,
    )
    for path in dump_program(plan.program, plan, tmp_path / "here"):
        text = path.read_text()
        assert text == (tmp_path / "there" / path.name).read_text()
        assert not re.search(r"0x[0-9a-f]{6,}", text)
        assert str(ROOT) not in text


def test_the_dumped_python_runs_and_equals_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    plan = planned(1, model)
    program = plan.program
    dump_program(program, plan, tmp_path)
    x = torch.randn(4, 8)
    eager = copy.deepcopy(model)
    expected = eager(x)
    expected.backward()

    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    names = [entry.fqn for entry in (*program.params, *program.buffers)]
    with torch.no_grad():
        results = load(tmp_path / "forward.py").forward(*(tensors[n] for n in names), x)
        outputs, mutations, kept, others = results
        backward = load(tmp_path / "backward.py").backward
        grads, input_grads = backward(*kept, *others, torch.ones(()))
    assert mutations == []
    assert input_grads == [None]
    assert torch.equal(outputs[0], expected)
    for param, grad in zip(program.params, grads, strict=True):
        assert torch.equal(grad, eager.get_parameter(param.fqn).grad), param.fqn


def test_the_dumped_python_says_what_its_arguments_are(
    plan: graphshard.ShardingPlan, tmp_path: Path
) -> None:
    dump_program(plan.program, plan, tmp_path)
    forward = load(tmp_path / "forward.py").__doc__
    assert re.search(r"f32\[2, 8\] +parameter layers.1.linear.weight, this rank's shard", forward)
    assert re.search(r"f32\[\] +buffer scale", forward)
    assert re.search(r"f32\[4, 8\] +input args\[0\]", forward)
    assert "each rank of 4" in forward
    backward = load(tmp_path / "backward.py").__doc__
    assert re.search(r"f32\[\] +gradient of output", backward)
    assert re.search(r"\] +kept from forward", backward)


def test_a_forward_only_program_has_no_backward_file(tmp_path: Path) -> None:
    with torch.no_grad():
        plan = planned(2)
    assert not plan.program.grad
    names = [path.name for path in dump_program(plan.program, plan, tmp_path)]
    assert names == [name for name in FILES if name != "backward.py"]


def test_a_sharded_module_dumps_every_program_it_holds(tmp_path: Path) -> None:
    sharded = graphshard.compile(Net(), graphshard.BlockPolicy({Layer}))
    with pytest.raises(graphshard.RuntimeStateError, match="no program to dump"):
        sharded.dump(tmp_path)
    with pytest.raises(graphshard.RuntimeStateError, match="no program was captured yet"):
        _ = sharded.program
    assert list(tmp_path.iterdir()) == []
    sharded(torch.ones(4, 8))
    sharded(torch.ones(2, 8))
    paths = sharded.dump(tmp_path)
    further = tmp_path / "program_1"
    assert paths == [tmp_path / name for name in FILES] + [further / name for name in FILES]
    assert "f32[4, 8]" in (tmp_path / "forward.py").read_text()
    assert "f32[batch, 8]" in (further / "forward.py").read_text()
    assert all(path.exists() for path in paths)


def test_source_of_names_that_no_import_brings() -> None:
    graph = fx.Graph()
    full = graph.call_function(
        torch.full, ([2], float("-inf")), {"device": torch.device("cpu"), "dtype": torch.float32}
    )
    graph.output((full, [graph.call_function(max, (float("inf"), 1))]))
    source = graph_source(graph, "infinite", 'It says """hello""" and a back\\slash.')
    names: dict[str, Any] = {}
    exec(compile(source, "dumped", "exec"), names)
    tensor, (largest,) = names["infinite"]()
    assert torch.equal(tensor, torch.full([2], float("-inf")))
    assert largest == float("inf")
    assert names["__doc__"] == 'It says """hello""" and a back\\slash.'


def test_schedule_graph_holds_the_schedule_and_its_order(plan: graphshard.ShardingPlan) -> None:
    graph = schedule_graph(plan.program)
    events = plan.program.schedule()
    assert [(d["op"], d["unit"], d["phase"]) for _, d in graph.nodes(data=True)] == [
        (e.op, e.unit, e.phase) for e in events
    ]
    assert nx.is_directed_acyclic_graph(graph)
    for stream in ("compute", "communication"):
        on_it = [n for n, s in graph.nodes(data="stream") if s == stream]
        assert all(graph.edges[pair]["order"] for pair in pairwise(on_it))
    collectives = {"all_gather", "reduce_scatter", "all_reduce"}
    streams = {(d["op"] in collectives, d["stream"]) for _, d in graph.nodes(data=True)}
    assert streams == {(True, "communication"), (False, "compute")}


def test_schedule_graph_knows_what_uses_what(plan: graphshard.ShardingPlan) -> None:
    graph = schedule_graph(plan.program)
    data = nx.subgraph_view(graph, filter_edge=lambda a, b: graph.edges[a, b]["data"])
    for index, attributes in graph.nodes(data=True):
        before = [graph.nodes[n] for n in data.predecessors(index)]
        if attributes["op"] == "wait":
            (collective,) = before
            assert collective["stream"] == "communication"
            assert collective["unit"] == attributes["unit"]
        if attributes["op"] == "reduce_scatter":
            assert "compute" in {node["op"] for node in before}
        if attributes["op"] == "all_gather":
            assert before == []  # shards come from outside


def test_dot_is_well_formed_and_complete(plan: graphshard.ShardingPlan) -> None:
    graph = schedule_graph(plan.program)
    nodes, edges, depth = 0, 0, 0
    string = r'"(?:[^"\\]|\\.)*"'
    shapes = [
        (rf"  node \[fontname={string}\];|  rankdir=TB;|    label={string};", 0, 0, 0),
        (rf"digraph schedule \{{|  subgraph {string} \{{", 0, 0, 1),
        (r"  ?\}|\}", 0, 0, -1),
        (rf"    \d+ \[label={string}, shape=\w+\];", 1, 0, 0),
        (r"  \d+ -> \d+ \[style=(solid|dotted)\];", 0, 1, 0),
    ]
    for line in dot_text(graph).splitlines():
        (match,) = [shape[1:] for shape in shapes if re.fullmatch(shape[0], line)]
        nodes, edges, depth = nodes + match[0], edges + match[1], depth + match[2]
    assert (nodes, edges, depth) == (len(graph), graph.number_of_edges(), 0)


def test_dot_quotes_names() -> None:
    graph = nx.DiGraph()
    graph.add_node(0, op="free", unit='a"b\\c', phase="forward", stream="compute")
    assert r'label="free\na\"b\\c"' in dot_text(graph)


def test_a_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch, capsys):
    factory = "from torch import nn, ones\ndef net(): return nn.Linear(2, 2), (ones(2, 2),)\n"
    (tmp_path / "net_in_a_file.py").write_text(factory)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "net_in_a_file.py"
    asked = ["net_in_a_file:net", "--policy", "size:1", "--world-size", "2"]
    assert main(["dump", *asked, "--out", str(file)]) == 1
    said = capsys.readouterr().err
    assert "a file cannot be read or written" in said
    assert str(file) in said.replace("\n", "")
