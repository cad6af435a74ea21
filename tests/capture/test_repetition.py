"""Repeated blocks are traced twice, and the program is the one that tracing all of them gives."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kv_cache_models import FillingBlocks
from repeated_blocks import DEPTH, HIDING, REPEATED, WHOLE, WIDTH, EachUsed, Stack, encoder
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphshard.capture import alike, repetition
from graphshard.capture.captured import Capture
from graphshard.capture.entry import capture
from graphshard.policy import MixedPrecision
from graphshard.policy.precision import Precisions
from graphshard.progress import Progress

EVERY = {**REPEATED, **WHOLE, **HIDING}


def _form(val: Any) -> Any:
    return (val.shape, val.stride(), val.dtype) if isinstance(val, Tensor) else str(val)


def _nodes(captured: Capture) -> list[tuple[Any, ...]]:
    """The nodes, by number, with what is noted of them; equal constants count as one."""
    calls: dict[Any, int] = {}
    program = captured.program
    constants = [entry.node for entry in program.buffers if entry.constant]
    names = {node: f"{node.meta['val'].dtype} constant" for node in constants}
    lines = []
    for node in program.graph.nodes:
        if node in names:
            continue
        names[node] = f"%{len(names) - len(constants)}"
        val = node.meta.get("val", ())
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), names.__getitem__)
        lines.append(
            (
                node.op,
                node.name if node.op == "placeholder" else str(node.target),
                str((args, kwargs)),
                [_form(each) for each in pytree.tree_leaves(val)],
                *(node.meta.get(key) for key in ("fqn", "phase", "line", "recompute_keep")),
                *((f, calls.setdefault(n, len(calls))) for f, n in node.meta.get("calls", ())),
                *(
                    calls.setdefault(("r", n), len(calls))
                    for n in node.meta.get("recompute_region", ())
                ),
            )
        )
    return lines


def _both(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, *args: Tensor, **options: Any
) -> tuple[Capture, Capture, bool]:
    """A capture, one that repeats nothing, and whether the first left calls out."""
    made: list[repetition.Repetition] = []
    of_init = repetition.Repetition.__init__

    def noted(self: Any, **options: Any) -> None:
        of_init(self, **options)
        made.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(repetition.Repetition, "__init__", noted)
        state = random.getstate()
        captured = capture(model, args, **options)
    with monkeypatch.context() as patch:
        patch.setattr(alike, "FEWEST", 1 << 30)
        random.setstate(state)
        whole = capture(model, args, **options)
    return captured, whole, made[-1].used and any(kind.repeats for kind in made[-1].kinds)


def _assert_same(captured: Capture, whole: Capture) -> None:
    assert _nodes(captured) == _nodes(whole)
    paths = [sorted(place.path for place in each.guards.places) for each in (captured, whole)]
    assert paths[0] == paths[1]
    assert captured.program.notes == whole.program.notes
    assert captured.returns_as(whole)


def _cases() -> Iterator[Any]:
    """All models as they are trained, and those that repeat in evaluation; the rest of it is slow.

    Blocks that are no repetitions are found by the same rules in both.
    """
    for name in EVERY:
        yield pytest.param(name, True, id=f"{name}-training")
        marks = [] if name in REPEATED else [pytest.mark.slow]
        yield pytest.param(name, False, id=f"{name}-forward", marks=marks)


@pytest.mark.parametrize(("name", "grad"), [*_cases()])
@pytest.mark.filterwarnings("ignore")
def test_the_program_is_that_of_a_whole_trace(
    name: str, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = EVERY[name]()
    captured, whole, repeats = _both(monkeypatch, model, torch.randn(4, WIDTH), grad=grad)
    _assert_same(captured, whole)
    if grad and name not in HIDING:
        assert repeats == (name in REPEATED)


@pytest.mark.parametrize(
    "name",
    [name if name == "plain" else pytest.param(name, marks=pytest.mark.slow) for name in EVERY],
)
@pytest.mark.filterwarnings("ignore")
def test_with_symbolic_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = EVERY[name]()
    x = torch.randn(4, WIDTH)
    captured, whole, repeats = _both(monkeypatch, model, x, names=({0: "batch"},))
    _assert_same(captured, whole)
    if name not in HIDING:
        assert repeats == (name in REPEATED)


_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 64,
    "intermediate_size": 48, "use_cache": False,
}  # fmt: skip

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

_LATENT = {
    "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", {"num_key_value_heads": 2}),
    "Qwen2": ("ForCausalLM", {"num_key_value_heads": 2}),
    "Qwen3": ("ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8}),
    "Qwen3Moe": ("ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8, **_EXPERTS}),
    "Gemma2": ("ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 10}),
    "Mixtral": ("ForCausalLM", {"num_key_value_heads": 2, "num_local_experts": 4}),
    "DeepseekV3": ("ForCausalLM", _LATENT),
    "GPT2": ("LMHeadModel", {}),
    "GPTNeoX": ("ForCausalLM", {}),
    "OPT": ("ForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32, "layerdrop": 0.0}),
    "Falcon": ("ForCausalLM", {}),
    "Bert": ("ForMaskedLM", {}),
    "Roberta": ("ForMaskedLM", {}),
    "DebertaV2": ("ForMaskedLM", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("cache", [False, True], ids=["", "with a cache"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_program_of_a_model_of_transformers(
    family: str, cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    head, sizes = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **sizes})
    with torch.device("meta"):
        model = getattr(transformers, family + head)(config)
        ids = torch.zeros(2, 8, dtype=torch.long)
    call = {"input_ids": ids, "labels": ids, "use_cache": cache}
    for names in (None, [{0: "batch", 1: "length"}] * 2):
        captured, whole, repeats = _both(monkeypatch, model, kwargs=call, names=names)
        _assert_same(captured, whole)
        assert repeats != (cache and family == "Gemma2")  # whose layers keep a part of the keys


_STILL_REPEAT = (
    "", "asks for the cache's type", "has other modules without", "fills by keyword",
)  # fmt: skip


def _cache() -> Any:
    return pytest.importorskip("transformers").DynamicCache


@pytest.mark.parametrize(
    "odd",
    [
        "scales by the number",
        "takes an item by the number",
        "requires an int",
        "asks for the length",
        "reads another layer",
        "gives the number otherwise",
        "asks if it is an int",
        "asks for its type",
        "assigns it",
        "fills twice",
        *_STILL_REPEAT,
    ],
)
def test_blocks_that_fill_a_cache(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    captured, whole, repeats = _both(
        monkeypatch, FillingBlocks(odd, _cache()), torch.randn(4, WIDTH)
    )
    _assert_same(captured, whole)
    assert repeats == (odd in _STILL_REPEAT)


def test_a_fast_path_of_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        x = torch.randn(2, 3, WIDTH)
        captured, whole, _ = _both(monkeypatch, encoder(), x, grad=False)
    _assert_same(captured, whole)


@pytest.mark.parametrize("inner", [(), ("up",)], ids=["blocks", "inner units of some"])
def test_mixed_precision(inner: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(depth=8)
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    units = {f"blocks.{index}": bf16 for index in range(8)}
    units |= {f"blocks.{index}.{name}": bf16 for index in range(4) for name in inner}
    params = dict.fromkeys(
        (name for name, _ in model.named_parameters() if name.startswith("blocks")), torch.bfloat16
    )
    precisions = Precisions(units, params)
    captured, whole, repeats = _both(
        monkeypatch, model, torch.randn(4, WIDTH), precisions=precisions
    )
    _assert_same(captured, whole)
    assert repeats


def test_progress_counts_the_modules_of_calls_that_are_left_out() -> None:
    model, modules = encoder(), len([*encoder().modules()])
    stages: list[list[int]] = []

    class Stages(Progress):
        def stage(self, name: str, total: int | None = None) -> Any:
            stages.append([0, total or 0])
            return super().stage(name, total)

        def advance(self, steps: int = 1) -> None:
            stages[-1][0] += steps

    capture(model, (torch.randn(2, 3, WIDTH),), progress=Stages())
    assert stages == [[modules, modules]] * len(stages)
    assert stages


def test_what_blocks_differ_in_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "graphshard"):
        capture(EachUsed(at="each"), (torch.randn(4, WIDTH),))
    assert "blocks are traced one by one" in caplog.text
    assert "is used inside and outside of a block" in caplog.text
    with caplog.at_level(logging.INFO, "graphshard"):
        capture(FillingBlocks("fills twice", _cache()), (torch.randn(4, WIDTH),))
    assert "blocks like blocks.0 are traced one by one: it asks for values, or does" in caplog.text


def test_a_value_read_in_any_block_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack()
    captured, _, repeats = _both(monkeypatch, model, torch.randn(4, WIDTH))
    assert repeats
    assert {f"blocks.{index}.alpha" for index in range(DEPTH)} <= {
        place.path for place in captured.guards.places
    }
