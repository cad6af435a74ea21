"""The published runs: that the data is whole, and that runs are predicted as they ran."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from examples.benchmarks import literature, literature_kernels, literature_models, literature_runs
from graphshard.cost.fsdp2_allocations import fsdp2_lives
from graphshard.cost.memory import ACCUMULATED
from graphshard.program import ops
from graphshard.program.program import BACKWARD, RECOMPUTED

aten = torch.ops.aten
SCRIPT = Path(literature.__file__)


def run_named(name):
    (run,) = literature_runs.runs((name,))
    return run


def test_the_data_is_whole():
    contents = literature_runs.data()
    runs = literature_runs.runs()
    assert len(runs) == len({run.id for run in runs}) == 41
    assert {run.machine for run in runs} == set(contents["machines"])
    assert {run.model for run in runs} == set(contents["models"])
    for run in runs:
        assert run.source
        assert ("tokens_per_s" in run.published) != ("tflops" in run.published), run.id
        assert run.published.get("memory_is") in (None, "allocated", "reserved"), run.id
        assert len(run.mesh) == 1 or run.mesh[0] * run.mesh[1] == run.gpus, run.id
        assert run.compiled in ("nothing", "blocks", "model", "blocks and loss"), run.id
        assert literature_runs.machine(run).gpus_per_node in (4, 8)


def test_which_blocks_recompute():
    of = literature_runs.recomputed_blocks
    assert of("every 2nd block", 4) == ("none", "full", "none", "full")
    assert of("1/3 of blocks", 6) == ("none", "full", "none", "none", "full", "none")
    assert of("blocks", 2) == ("full", "full")
    assert of("by operator", 2) == ("op", "op")
    assert of("units", 2) == ("none", "none"), "the policy recomputes them, not the model"


def small(monkeypatch, name, **sizes):
    """The run whose name begins with `name`, with a small model and 16 tokens."""
    run = run_named(name)
    models = literature_runs.data()["models"]
    monkeypatch.setitem(models, run.model, {**models[run.model], **sizes})
    return replace(run, length=16, batch=2)


def predicted(run):
    (row,) = literature.predicted([run])
    return row


def test_runs_are_predicted_from_end_to_end(monkeypatch):
    mpt = small(monkeypatch, "mpt-a100-40-128", blocks=2, width=64, heads=4, vocabulary=96)
    row = predicted(mpt)
    assert row.seconds > sum(row.beside.values()) > 0
    assert set(row.beside) == {
        "copies of gradients",
        "clipping",
        "metrics",
    }
    assert row.predicted == pytest.approx(32 / row.seconds)
    assert row.fits
    assert literature.line(row).startswith("mpt-a100-40-128-125m-s2048")
    found = literature.summary([row])
    assert found["runs"] == 1
    assert "1 runs" in literature.text(found)


def row_with(origin: str, published: float, alone: float = 1.0) -> literature.Row:
    """A row whose operators take 0.9 of `alone` and run with an `in_step` of 1.2."""
    seconds = alone * 1.18
    memory = ("", None, 1.0, 1.0, True)
    return literature.Row(
        f"{origin}-x", "", "tokens/s", published, 1 / seconds, seconds, alone, 1.2, 0.0, {}, *memory
    )


def test_one_factor_for_all_runs_is_judged_without_those_of_an_origin():
    rows = [row_with("a", 1 / 1.09), row_with("b", 1 / 1.09), row_with("c", 1 / 1.18)]
    assert rows[0].error_at(1.0) == pytest.approx(0.09)
    assert rows[0].error_at(1.1) == pytest.approx(0.0)
    assert rows[2].error_at(1.2) == pytest.approx(rows[2].error) == pytest.approx(0.0)
    assert literature.fitted_in_step(rows) == pytest.approx(1.1)
    assert literature.fitted_in_step(rows[2:]) == pytest.approx(1.2)
    without = literature.held_out(rows)
    assert without[2] == pytest.approx(1.18 / 1.09 - 1), "the factor of the others"
    found = literature.summary(rows)
    assert found["one_by_one"]["bias"] == pytest.approx((0.09 + 0.09 + 0.18) / 3)
    assert "with that of all other origins" in literature.text(found)


def test_tflops_count_recomputation(monkeypatch):
    run = small(monkeypatch, "fsdp-blog-175b", blocks=1, width=64, heads=2)
    row = predicted(run)
    assert row.unit == "TFLOP/s"
    kept = predicted(replace(run, recompute="none"))
    assert row.predicted * row.seconds > kept.predicted * kept.seconds
    assert "offload params" in row.setting


def test_micro_batches_without_a_reduce_hold_their_full_gradients(monkeypatch):
    sizes = {"blocks": 1, "width": 64, "heads": 4, "kv_heads": 2, "hidden": 96, "vocabulary": 96}
    run = small(monkeypatch, "kempner-h200-4", **sizes)
    model, _ = literature_runs.model_of(run, 1)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    full = 4 * sum(parameter.numel() for parameter in model.parameters())
    (keeps, adds) = literature_runs.plans_of(run, literature_runs.capture_of(run, 1))
    assert (keeps[0], adds[0]) == (run.accumulation - 1, 1)
    for _, plan in (keeps, adds):
        held = [
            life.request.size
            for life in fsdp2_lives(plan.program)
            if life.request.category == ACCUMULATED
        ]
        assert sum(held) == full
    reduces = [sum(n.target in ops.REDUCES for n in p.program.nodes()) for _, p in (keeps, adds)]
    assert reduces[0] == 0 < reduces[1]


def test_every_second_product_is_computed_again(monkeypatch):
    sizes = {"blocks": 1, "width": 64, "heads": 4, "kv_heads": 2, "hidden": 96, "vocabulary": 96}
    run = small(monkeypatch, "tt-a100-l3-8b-op", **sizes)
    captured = literature_runs.capture_of(run, 1)
    ((times, plan),) = literature_runs.plans_of(run, captured)
    assert times == 1
    again = [node for node in plan.program.nodes(BACKWARD) if RECOMPUTED in node.meta]
    widths = Counter(n.meta["val"].shape[-1] for n in again if n.target is aten.mm.default)
    assert widths == {32: 1, 64: 1, 96: 1}, "keys, what follows attention, and one of w1 and w3"
    assert not [n for n in again if "attention" in str(n.target)]


@pytest.mark.slow
def test_a_line_through_two_depths_meets_the_whole(monkeypatch):
    run = small(
        monkeypatch, "ibm-a100-7b-eager", blocks=14, width=256, heads=4, kv_heads=4, hidden=512
    )
    run = replace(run, length=128)
    (line,), (whole,) = ([*literature.predicted([run], whole=whole)] for whole in (False, True))
    assert line.seconds == pytest.approx(whole.seconds, rel=1e-6)
    assert line.allocated_gib == pytest.approx(whole.allocated_gib, rel=1e-3)


@pytest.mark.parametrize("kernel", ["cross_entropy", "swiglu", "rotary"])
def test_kernels_compute_what_several_operators_do(kernel):
    torch.manual_seed(0)
    angles = torch.rand(3, 4)
    own = getattr(literature_kernels, kernel)
    calls = {
        "cross_entropy": (F.cross_entropy, [(5, 7)], [torch.tensor([1, 0, 6, 2, 2])]),
        "swiglu": (lambda gate, up: F.silu(gate) * up, [(3, 4), (3, 4)], []),
        "rotary": (_rotated, [(2, 3, 2, 8)], [angles.cos(), angles.sin()]),
    }
    plain, shapes, rest = calls[kernel]
    operands = [torch.randn(shape, requires_grad=True) for shape in shapes]
    results = [function(*operands, *rest) for function in (own, plain)]
    torch.testing.assert_close(*results)
    weights = torch.randn_like(results[0])
    grads = [torch.autograd.grad((out * weights).sum(), operands) for out in results]
    torch.testing.assert_close(*grads)


def _rotated(x, cos, sin):
    turns = torch.complex(cos, sin)[:, None]
    one, two = x.chunk(2, -1)
    turned = torch.complex(one, two) * turns
    return torch.cat((turned.real, turned.imag), -1)


def test_rotary_embeddings_differ_in_their_operators_alone():
    torch.manual_seed(0)
    x = torch.randn(1, 3, 2, 8)
    turns = torch.polar(torch.ones(3, 4), torch.rand(3, 4))
    of = literature_models.ROTARY
    torch.testing.assert_close(of["halves"](x, turns), of["transformers"](x, turns))
    torch.testing.assert_close(of["halves"](x, turns), of["one kernel"](x, turns))


@pytest.mark.slow
def test_the_script_predicts_published_runs():
    command = [sys.executable, str(SCRIPT), "mpt-a100-40", "ibm-a100-7b", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    contents = json.loads(done.stdout)
    assert len(contents["rows"]) == 4
    assert contents["summary"]["median_error"] < 0.15
    assert all(abs(row["error"]) < 0.3 and row["fits"] for row in contents["rows"])
