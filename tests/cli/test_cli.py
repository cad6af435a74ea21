"""The command line: what it prints, what it refuses and with which exit code."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import graphshard
from graphshard.cli.main import main

MODELS = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, scale=1.0):
        return torch.relu(self.linear(x)) * scale


class Net(nn.Module):
    def __init__(self, width=16, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x, scale=1.0):
        for layer in self.layers:
            x = layer(x, scale)
        return self.head(x).mean()


def bare():
    return Net()


def with_args():
    return Net(), (torch.randn(2, 16),)


def with_kwargs():
    return Net(), (torch.randn(2, 16),), {"scale": 0.5}


def huge():
    return Net(width=200_000, depth=40)


def nothing():
    return None


def tensor_for_args():
    return Net(), torch.randn(2, 16)


def broken():
    raise ZeroDivisionError("the factory's own fault")


def interrupted():
    raise KeyboardInterrupt


value = 3
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's project as the current directory, with a module of factories in it."""
    (tmp_path / "factories.py").write_text(MODELS)
    (tmp_path / "broken_module.py").write_text("import missing_dependency\n")
    (tmp_path / "unparsable.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("factories", "broken_module"):  # not another test's
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("factories", "broken_module"):
        sys.modules.pop(name, None)


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def library_plan(policy: graphshard.Policy, **keywords: object) -> graphshard.ShardingPlan:
    sys.path.insert(0, os.getcwd())
    with torch.device("meta"):
        model = importlib.import_module("factories").bare()
    return graphshard.plan(model, policy, **keywords)


@pytest.mark.parametrize(
    ("option", "policy"),
    [
        ("size:200", graphshard.SizePolicy(min_num_params=200)),
        ("block:Layer", graphshard.BlockPolicy(["Layer"])),
    ],
)
def test_plan_is_the_librarys_plan(
    option: str, policy: graphshard.Policy, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "factories:bare", "--policy", option, "--world-size", "8"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    expected = library_plan(policy, world_size=8)
    assert printed == f"{expected}\n"
    assert len(expected.units) == 5
    assert main([*arguments, "--unfold"]) == 0
    assert capsys.readouterr().out == expected.text(unfold=True) + "\n" != printed


def test_every_policy_field_reaches_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["factories:bare", "--policy", "block:Layer", "--mesh", "4"]
    fields = ["--strategy", "SHARD_GRAD_OP", "--backward-prefetch", "none"]
    fields += ["--forward-prefetch", "2", "--memory-budget", "2GiB"]
    fields += ["--merge-below", "32KiB"]
    fields += ["--recompute", "units", "--sync-module-states", "--cuda-graph"]
    fields += ["--param-dtype", "bf16", "--reduce-dtype", "fp32", "--ignored", r".*\.bias"]
    fields += ["--offload", "params", "--offload", "activations", "--check-finite", "warn"]
    policy = plan_json(capsys, *common, *fields)["policy"]
    expected = graphshard.BlockPolicy(
        ["Layer"],
        strategy="SHARD_GRAD_OP",
        backward_prefetch=None,
        forward_prefetch=2,
        merge_below=32768,
        memory_budget=2**31,
        recompute="units",
        sync_module_states=True,
        cuda_graph=True,
        check_finite="warn",
        mixed_precision=graphshard.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32),
        ignored=r".*\.bias",
        offload=("params", "activations"),
    )
    assert policy == expected.to_dict()
    assert plan_json(capsys, *common)["policy"] == graphshard.BlockPolicy(["Layer"]).to_dict()
    assert plan_json(capsys, *common, "--reshard-root")["policy"]["reshard_root"] is True
    assert plan_json(capsys, *common, "--gather-unused")["policy"]["gather_unused"] is True
    by_cost = plan_json(capsys, *common, "--schedule", "overlap", "--hardware", "h200")["policy"]
    assert (by_cost["schedule"], by_cost["hardware"]) == ("overlap", "h200")
    for text, value in (("true", True), ("false", False), ("2", 2)):
        policy = plan_json(capsys, *common, "--reshard-after-forward", text)["policy"]
        assert policy["reshard_after_forward"] is value or policy["reshard_after_forward"] == 2


def test_policies_of_other_systems_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "fsdp.yaml").write_text(
        "fsdp_config: {fsdp_sharding_strategy: 2, fsdp_auto_wrap_policy: 1, "
        "fsdp_transformer_layer_cls_to_wrap: Layer}"
    )
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 1}}')
    for text, strategy in (("accelerate:fsdp.yaml", 2), ("deepspeed:zero.json", 1)):
        kind, _, name = text.partition(":")
        policy = f"{kind}:{tmp_path / name}"
        shown = plan_json(capsys, "factories:bare", "--policy", policy, "--world-size", "2")
        wanted = {1: "SHARD_OPTIMIZER", 2: "SHARD_GRAD_OP"}[strategy]
        assert shown["policy"]["strategy"] == wanted


def test_a_plan_on_a_mesh_of_two_dimensions(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "factories:bare", "--policy", "block:Layer", "--mesh", "2x8"]
    assert main([*arguments, "--strategy", "HYBRID_SHARD", "--reshard-after-forward", "2"]) == 0
    printed = capsys.readouterr().out
    assert "HYBRID_SHARD, world size 16, mesh 2 x 8 (replicate x shard)" in printed
    assert "to groups of 2 ranks" in printed
    assert main(arguments) == 2
    assert "use HYBRID_SHARD to shard over its last dimension" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*arguments, "--reshard-after-forward", "some"])
    assert "'some' is not true, false or a number of ranks" in capsys.readouterr().err


@pytest.mark.parametrize("factory", ["with_args", "with_kwargs"])
def test_plan_with_example_inputs_captures_and_says_how_long(
    factory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"factories:{factory}", "--policy", "block:Layer", "--world-size", "2"]
    assert main(["plan", *arguments, "--times"]) == 0
    captured = capsys.readouterr()
    assert "sharding plan of Net" in captured.out
    stages = [re.split(r" s +", line, maxsplit=1)[1] for line in captured.err.splitlines()]
    assert {"build the model", "plan", "capture", "verify"} <= set(stages)


def test_a_model_too_large_for_this_machine_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json(capsys, "factories:huge", "--policy", "size:1e9", "--world-size", "64")
    assert len(plan["units"]) == 41


def test_dump_writes_the_files_it_lists(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["factories:with_args", "--policy", "block:Layer", "--world-size", "2"]
    assert main(["dump", *arguments, "--out", "out/of/it"]) == 0
    listed = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(listed) == sorted(Path("out/of/it").iterdir())
    schedule = Path("out/of/it/schedule.txt").read_text()
    assert "all_gather" in schedule
    assert "reduce_scatter" in schedule


def test_the_program_can_be_run_as_a_module_and_piped(project: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "graphshard",
        "plan",
        "factories:bare",
        "--policy",
        "block:Layer",
    ]
    root = Path(graphshard.__file__).parent.parent
    result = subprocess.run(
        [*command, "--world-size", "4"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(root), "PATH": "", "COLUMNS": "40"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{library_plan(graphshard.BlockPolicy(['Layer']), world_size=4)}\n"


def test_a_reader_that_goes_away_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["plan", "factories:bare", "--policy", "block:Layer", "--world-size", "2"]) == 0


REFUSED = [
    (["factories", "--policy", "block:Layer"], 2, "pkg.module:function"),
    (["factories:absent", "--policy", "block:Layer"], 2, "no function named 'absent'"),
    (["factories:value", "--policy", "block:Layer"], 2, "no function named 'value'"),
    (["absent:bare", "--policy", "block:Layer"], 2, "no module named 'absent'"),
    (["factories:nothing", "--policy", "block:Layer"], 2, "it returned NoneType"),
    (["factories:tensor_for_args", "--policy", "block:Layer"], 2, "it returned (Net, Tensor)"),
    (["factories:bare", "--policy", "blocks"], 2, "a policy is written size:N"),
    (["factories:bare", "--policy", "size:big"], 2, "size:N takes a whole number"),
    (["factories:bare", "--policy", "size:1.5"], 2, "size:N takes a whole number"),
    (["factories:bare", "--policy", "block:Lair"], 2, "Layer"),
    (["factories:broken", "--policy", "block:Layer"], 1, "ZeroDivisionError: the factory's own"),
    (["unparsable:f", "--policy", "block:Layer"], 1, "SyntaxError"),
    (["broken_module:f", "--policy", "block:Layer"], 1, "No module named 'missing_dependency'"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), REFUSED)
def test_what_cannot_be_done_is_said_in_one_paragraph(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments, "--world-size", "2"]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert main(["plan", *arguments, "--world-size", "2", "--debug"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    said = f"graphshard {importlib.metadata.version('graphshard')}, torch {torch.__version__}"
    assert capsys.readouterr().out.strip() == said


def test_a_dump_needs_example_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["factories:bare", "--policy", "block:Layer", "--world-size", "2", "--out", "x"]
    assert main(["dump", *arguments]) == 2
    assert "a dump needs example inputs" in capsys.readouterr().err
    assert not Path("x").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["plan", "factories:bare", "--world-size", "2"],
        ["plan", "factories:bare", "--policy", "block"],
        ["plan", "factories:bare", "--policy", "block", "--world-size", "2", "--mesh", "2"],
        ["plan", "factories:bare", "--policy", "block", "--mesh", "two"],
        ["plan", "factories:bare", "--policy", "block", "--mesh", "2", "--memory-budget", "2Gib"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert "usage: graphshard" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    ["--optimizer adamw --plot step.svg --unfold", "--seconds=3", "--optimizer"],
)
def test_options_of_other_commands_are_noted(
    options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ["plan", "factories:bare", "--policy", "block:Layer", "--world-size", "2"]
    assert main([*plan, *options.split()]) == 0
    error = capsys.readouterr().err
    name = options.split()[0].partition("=")[0]
    assert f"graphshard plan: {name} has no effect here; it is one of " in error
    assert "--unfold" not in error


def test_an_option_of_another_command_takes_no_other_option_with_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = ["plan", "factories:bare", "--policy", "block:Layer", "--world-size", "2"]
    with pytest.raises(SystemExit):
        main([*plan, "--optimizer", "--unfld"])
    assert "there is no option --unfld; did you mean --unfold?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("plan f:g --polcy block --mesh 2", "there is no option --polcy; did you mean --policy?"),
        ("plan f:g --policy block --wold-size=2", "did you mean --world-size?"),
        ("plan f:g --policy block --world-size 2 --stratgy x", "did you mean --strategy?"),
        ("plan f:g more --policy block --world-size 2", "unrecognized arguments: more"),
        ("plan f:g --policy block --world-size 2 --optimizer adamw more", "arguments: more"),
        ("dump f:g --policy block --mesh 2 --zzz", "following arguments are required: --out"),
    ],
)
def test_a_misspelt_option_is_told_from_a_missing_one(
    arguments: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments.split())
    *_, usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: graphshard ")
    assert usage.endswith(" [OPTIONS]")
    assert meant in error


def test_a_plan_is_for_its_hardware_and_dtypes_have_two_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def plan(*options: str) -> str:
        arguments = ("plan", "factories:with_args", "--policy", "block:Layer", "--world-size", "4")
        assert main([*arguments, *options]) == 0
        return capsys.readouterr().out

    assert "forward_prefetch=1 (by default on nccl)" in plan()
    assert "forward_prefetch=0 (by default on gloo)" in plan("--hardware", "cpu-gloo")
    named = plan("--param-dtype", "bfloat16", "--reduce-dtype", "float32")
    assert named == plan("--param-dtype", "bf16", "--reduce-dtype", "fp32")
    assert "param_dtype=bfloat16, reduce_dtype=float32" in named


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("RANK", "1")  # no bars among what is compared
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_errors_are_red_on_a_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["plan", "factories:bare", "--policy", "blocks", "--world-size", "2"]) == 2
    assert terminal.getvalue().startswith("\x1b[31ma policy is written")


def test_the_plan_is_coloured_on_a_terminal(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["plan", "factories:bare", "--policy", "block", "--world-size", "2"]) == 2
    assert terminal.getvalue() == ""
    assert main(["plan", "factories:bare", "--policy", "block:Layer", "--world-size", "2"]) == 0
    assert "layers.0-3" in terminal.getvalue()
    assert "\x1b[" in terminal.getvalue()


def test_interrupting_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["factories:interrupted", "--policy", "block:Layer", "--world-size", "2"]
    assert main(["plan", *arguments]) == 130
    assert capsys.readouterr().err == ""


def test_units_of_their_own_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "factories:bare", "--policy", "block:Layer", "--world-size", "2"]
    units = ["--unit", "layers.3:reshard-after-forward=false", "--unit", "head:strategy=NO_SHARD"]
    assert main([*arguments, "--unit", "layers.0:placement=1", *units]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"layers.3 .* reshard=False", shown)
    assert re.search(r"head .* strategy=NO_SHARD, reshard=False", shown)
    assert "dim 1: layers.0.linear.weight [16, 16]" in shown
    assert main([*arguments, "--unit", "nothing"]) == 2
    assert "no module of the model matches" in capsys.readouterr().err


def test_names_of_strategies_and_dtypes_may_be_those_of_python(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shared = ("factories:with_args", "--policy", "size:1", "--world-size", "4")
    one = ("--strategy", "SHARD_GRAD_OP", "--param-dtype", "bf16", "--reduce-dtype", "fp32")
    same = ("--strategy", "shard_grad_op", "--param-dtype", "torch.bfloat16")
    other = plan_json(capsys, *shared, *same, "--reduce-dtype", "torch.float32")
    assert other == plan_json(capsys, *shared, *one)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "factories:with_arg"), "did you mean with_args?"),
        (("plan", "out/config.json"), "did you mean hf:out/config.json?"),
        (
            ("report", "factories:with_args", "--out", "."),
            "--out is a file to write; . is a folder",
        ),
    ],
)
def test_a_mistake_names_its_mend(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--policy", "size:1", "--world-size", "4"]) == 2
    assert message in capsys.readouterr().err
