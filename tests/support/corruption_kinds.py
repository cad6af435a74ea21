"""Every kind of corruption of a finished program, and the rules that refuse it, in one table.

A row says where a program can be corrupted (`corruption_places`), how (`corruption_edits`), and the
rules of which one names the fault, depending on program and place. "harmless" among them says that
the corrupted program may be accepted; then it returns the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import corruption_edits as do
import corruption_places as at
import torch
from corruption_edits import Edit
from corruption_places import Places, aten, calls

from graphshard.program import ops
from graphshard.program.ops import (
    accumulate_grad,
    add_accumulated,
    all_gather,
    all_reduce,
    all_reduce_shard,
    arrive,
    free,
    reduce_scatter,
    release,
    reshard,
    to_device,
    to_host,
    wait,
)

HARMLESS = "harmless"


@dataclass(frozen=True)
class Kind:
    """One kind of corruption."""

    name: str
    places: Places
    edit: Edit
    outcomes: str  # names of rules, and HARMLESS, separated by commas

    @property
    def rules(self) -> frozenset[str]:
        """The rules, one of which refuses it, and HARMLESS if it may be accepted."""
        return frozenset(self.outcomes.split(", "))


_BY_NAME = {op.name: op for op in ops.OPS.values()}


def each(edit: Edit, text: str, rows: Mapping[str, str]) -> tuple[Kind, ...]:
    """One row for each op of the vocabulary; `rows` has outcomes, and the ops that have them."""
    return tuple(
        Kind(f"{name} {text}", calls(_BY_NAME[name].target), edit, outcomes)
        for outcomes, names in rows.items()
        for name in names.split()
    )


gathers = calls(all_gather)
reduces = calls(*ops.REDUCES)
collectives = calls(*ops.COLLECTIVES)
waits = calls(wait)
fulls = at.results_of(all_gather)
shards = at.results_of(*ops.REDUCES)
dropouts = calls(aten.native_dropout.default)
constants = at.entries("buffers", lambda entry: entry.constant)

_REDUCES = "reduce_scatter all_reduce all_reduce_shard"
_COLLECTIVES = f"all_gather {_REDUCES}"
_COPIES = "to_device to_host arrive"
_KEPT = "accumulate_grad add_accumulated"
_STATES = "save_random_state set_random_state"

KINDS: tuple[Kind, ...] = (
    # -- each op of the vocabulary -----------------------------------------------------------------
    *each(
        do.deleted,
        "deleted",
        {
            "operands": _COLLECTIVES,
            "operands, waits": "wait",
            "frees": "free",
            "harmless": "release",
            "gathers": "reshard",
            "shapes": "cast",
            "copies": _COPIES,
            "reduces, replicas": "accumulate_grad",
            "accumulated": "add_accumulated",
            "checks": "check_finite report_finite",
            "random states": _STATES,
        },
    ),
    *each(
        do.repeated_behind,
        "done twice",
        {
            "waits": f"{_COLLECTIVES} wait",
            "frees": "free",
            "releases": "release",
            "harmless": "reshard cast save_random_state",
            "copies": _COPIES,
            "accumulated": _KEPT,
            "checks": "check_finite report_finite",
            "random states": "set_random_state",
        },
    ),
    *each(
        do.repeated_before,
        "done twice, the first for nothing",
        {
            "waits": f"{_COLLECTIVES} wait",
            "frees": "free",
            "releases": "release",
            "harmless": "reshard cast save_random_state",
            "copies": _COPIES,
            "accumulated": _KEPT,
            "random states": "set_random_state",
        },
    ),
    *each(
        do.repeated_for_a_reader,
        "done again for a reader",
        {
            "waits": "wait",
            "lifetimes": "reshard",
            "harmless": "cast",
            "copies": _COPIES,
            "accumulated": "add_accumulated",
            "random states": "save_random_state",
        },
    ),
    *each(
        do.above_its_operands,
        "before its operands",
        {
            "layout, metadata": f"{_REDUCES} wait free release reshard cast {_COPIES} {_KEPT} "
            "set_random_state"
        },
    ),
    *each(
        do.below_its_readers,
        "behind a reader",
        {
            "layout, metadata": f"{_COLLECTIVES} wait reshard cast {_COPIES} add_accumulated "
            "save_random_state"
        },
    ),
    *each(
        do.in_the_other_phase,
        "said to be of the other phase",
        {
            "layout, waits": "all_gather",
            "layout, phases, harmless": "free cast",
            "layout": f"{_REDUCES} wait release reshard {_COPIES} {_KEPT} {_STATES}",
        },
    ),
    *each(
        do.at_the_other_phase,
        "moved to the other phase",
        {
            "layout, metadata, waits": "all_gather",
            "layout, metadata": f"{_REDUCES} wait release reshard to_host arrive {_KEPT}",
            "layout, lifetimes, metadata, phases, harmless": "free",
            "layout, metadata, harmless": "cast",
            "copies, layout, metadata": "to_device",
            "layout, metadata, random states": _STATES,
        },
    ),
    *each(
        do.keyword("unit", do.another_unit),
        "of another unit",
        {"operands": f"{_COLLECTIVES} reshard cast {_KEPT}", "operands, harmless": _COPIES},
    ),
    *each(
        do.keyword("param", do.another_param),
        "of another parameter",
        {
            "gathers": "reshard",
            "harmless": "cast to_host arrive",
            "copies": "to_device",
            "accumulated, reduces, replicas": "accumulate_grad",
            "accumulated": "add_accumulated",
        },
    ),
    *each(
        do.meta("val", do.other_dtype),
        "said to be of another dtype",
        {"shapes": f"reshard cast {_COPIES} add_accumulated", "random states": _STATES},
    ),
    *each(
        do.meta("val", do.other_shape),
        "said to be of another shape",
        {"shapes": f"reshard cast {_COPIES} add_accumulated", "random states": _STATES},
    ),
    # -- collectives -------------------------------------------------------------------------------
    Kind(
        "a collective joins the group shard",
        at.where(collectives, lambda node: ops.group_of(node) != "shard"),
        do.each_group("shard"),
        "gathers, groups, reduces",
    ),
    Kind(
        "a collective joins the group replicate",
        at.where(collectives, lambda node: ops.group_of(node) != "replicate"),
        do.each_group("replicate"),
        "groups",
    ),
    Kind(
        "a collective joins the group all",
        at.where(collectives, lambda node: ops.group_of(node) != "all"),
        do.each_group("all"),
        "groups, reduces",
    ),
    Kind(
        "a collective joins the group reshard",
        at.where(collectives, lambda node: ops.group_of(node) != "reshard"),
        do.each_group("reshard"),
        "gathers, groups",
    ),
    Kind(
        "two operands of a collective exchanged",
        at.equal_operands(collectives),
        do.operands_exchanged,
        "gathers, replicas, same values",
    ),
    Kind(
        "two parameters of a collective exchanged",
        at.equal_operands(collectives),
        do.params_exchanged,
        "gathers, reduces, replicas",
    ),
    Kind(
        "two operands and their parameters exchanged",
        at.equal_operands(collectives),
        do.operands_and_params_exchanged,
        "reduces, replicas, reshards, same values",
    ),
    Kind(
        "an operand taken twice",
        at.equal_operands(collectives),
        do.operand_doubled,
        "gathers, replicas, same values",
    ),
    Kind("an operand dropped", collectives, do.operand_dropped, "operands, shapes"),
    Kind(
        "operands of two collectives exchanged",
        at.where(at.of_one_shape(collectives), at.operands_before),
        do.arguments_exchanged,
        "gathers",
    ),
    Kind(
        "two collectives exchanged",
        at.where(at.of_one_shape(collectives), at.operands_before),
        do.all_exchanged,
        "order, reshards",
    ),
    Kind(
        "waits of two collectives exchanged",
        at.where(at.of_one_shape(collectives), at.readers_behind),
        do.exchanged,
        "reduces, same values",
    ),
    Kind(
        "results picked from the other collective",
        at.pairs_of(waits),
        do.merged_waits,
        "lifetimes, reduces, replicas, reshards, same values",
    ),
    Kind(
        "a collective splits another dim",
        collectives,
        do.keyword("dims", lambda sample, node, dims: (1,) * len(node.args[0])),
        "operands",
    ),
    Kind(
        "a collective names a unit for too few operands",
        collectives,
        do.keyword(
            "units", lambda sample, node, units: (node.kwargs["unit"],) * (len(node.args[0]) + 1)
        ),
        "operands",
    ),
    Kind(
        "a gather in place",
        at.where(gathers, lambda node: "in_place" not in node.kwargs),
        do.keyword("in_place", lambda sample, node, value: True),
        "gathers",
    ),
    Kind(
        "a gather into new buffers",
        at.where(gathers, lambda node: "in_place" in node.kwargs),
        do.keyword("in_place", lambda sample, node, value: None),
        "gathers",
    ),
    Kind(
        "a gather of smaller groups",
        at.where(gathers, lambda node: "ranks" in node.kwargs),
        do.keyword("ranks", lambda sample, node, ranks: ranks // 2),
        "gathers",
    ),
    Kind(
        "a reshard for smaller groups",
        calls(reshard),
        do.keyword("ranks", lambda sample, node, ranks: ranks // 2),
        "gathers",
    ),
    Kind(
        "a gather's full parameters exchanged",
        at.where(at.pairs_of(fulls), at.readers_behind),
        do.exchanged,
        "lifetimes, reshards, same values",
    ),
    Kind(
        "a gather's next result picked",
        at.where(fulls, at.has_others),
        do.next_result,
        "releases, same values, shapes",
    ),
    Kind(
        "reduced shards exchanged",
        at.where(at.pairs_of(shards), at.readers_behind),
        do.exchanged,
        "reduces, replicas, same values",
    ),
    Kind(
        "a reduce's next result picked",
        at.where(shards, at.has_others),
        do.next_result,
        "reduces, replicas, same values, shapes",
    ),
    Kind(
        "parts of a resharded parameter exchanged",
        at.where(at.pairs_of(calls(reshard)), at.readers_behind),
        do.exchanged,
        "gathers",
    ),
    Kind(
        "a reduce_scatter as an all_reduce",
        calls(reduce_scatter),
        do.other_op(all_reduce),
        "groups, reduces",
    ),
    Kind(
        "a reduce_scatter as a gather",
        calls(reduce_scatter),
        do.other_op(all_gather),
        "gathers, operands",
    ),
    Kind(
        "a reduce_scatter as an all_reduce_shard",
        calls(reduce_scatter),
        do.other_op(all_reduce_shard),
        "harmless",
    ),
    Kind(
        "an all_reduce as a reduce_scatter",
        calls(all_reduce),
        do.other_op(reduce_scatter),
        "groups, reduces",
    ),
    Kind("a gather issued earlier", gathers, do.issued_earlier, "harmless"),
    Kind("a reduce issued earlier", reduces, do.issued_earlier, "regions, checks, harmless"),
    Kind("a wait later", waits, do.waited_later, "harmless"),
    # -- freed memory ------------------------------------------------------------------------------
    Kind("a free before a reader", at.freed_reads, do.above_a_reader, "lifetimes"),
    Kind("a release before a reader", at.released_reads, do.above_a_reader, "releases"),
    Kind("a freed value read", at.freed_values, do.read_behind, "lifetimes, metadata"),
    Kind("a free at the end of its phase", calls(free), do.freed_later, "checks, harmless"),
    Kind("a release at the end", calls(release), do.freed_later, "lifetimes"),
    Kind(
        "a free of another gather",
        at.where(at.pairs_of_frees, at.operands_before),
        do.arguments_exchanged,
        "lifetimes",
    ),
    Kind(
        "a release of another parameter",
        at.where(at.pairs_of_releases, at.operands_before),
        do.arguments_exchanged,
        "lifetimes, releases, harmless",
    ),
    # -- copies and transfers ----------------------------------------------------------------------
    Kind(
        "copies that arrive exchanged",
        at.where(at.pairs_of(calls(arrive)), at.readers_behind),
        do.exchanged,
        "gathers, reduces, same values",
    ),
    Kind(
        "copies under way exchanged",
        at.where(at.pairs_of(calls(to_host, to_device)), at.readers_behind),
        do.exchanged,
        "reduces, same values",
    ),
    Kind(
        "sources of copies exchanged",
        at.where(at.pairs_of(calls(to_host, to_device)), at.operands_before),
        do.arguments_exchanged,
        "copies, reduces, same values",
    ),
    Kind("a copy in the other direction", calls(to_host), do.other_op(to_device), "copies"),
    Kind("a copy to the host, not to the device", calls(to_device), do.other_op(to_host), "copies"),
    Kind("a cast dropped", at.casts, do.cast_dropped, "same values, shapes, unchanged"),
    Kind("a cast to float16", at.casts, do.cast_elsewhere, "same values, shapes"),
    Kind("a value rounded", at.read_floats, do.rounded_between(torch.float16), "same values"),
    Kind(
        "casts exchanged",
        at.where(at.pairs_of(at.casts), at.readers_behind),
        do.exchanged,
        "gathers, same values",
    ),
    # -- accumulated gradients ---------------------------------------------------------------------
    Kind(
        "gradients kept for each other",
        at.where(at.pairs_of(calls(accumulate_grad)), at.operands_before),
        do.arguments_exchanged,
        "reduces, same values",
    ),
    Kind(
        "accumulated gradients added to each other",
        at.where(at.pairs_of(calls(add_accumulated)), at.readers_behind),
        do.exchanged,
        "replicas, same values",
    ),
    Kind(
        "accumulated gradients named for each other",
        at.pairs_of(calls(add_accumulated)),
        do.keywords_exchanged,
        "same values",
    ),
    Kind(
        "kept gradients named for each other",
        at.pairs_of(calls(accumulate_grad)),
        do.keywords_exchanged,
        "reduces, same values",
    ),
    Kind(
        "kept in the other form",
        calls(accumulate_grad),
        do.keyword("of", do.other_form),
        "accumulated",
    ),
    Kind(
        "added in the other form",
        calls(add_accumulated),
        do.keyword("of", do.other_form),
        "accumulated",
    ),
    # -- gradients ---------------------------------------------------------------------------------
    Kind(
        "a gradient doubled",
        at.gradients,
        do.gradient_through(aten.mul.Tensor, 2),
        "reduces, replicas, same values",
    ),
    Kind(
        "a gradient negated",
        at.gradients,
        do.gradient_through(aten.neg.default),
        "reduces, replicas, same values",
    ),
    Kind(
        "a gradient divided by the ranks",
        at.gradients,
        do.gradient_through(aten.div.Tensor, 2),
        "reduces, replicas, same values",
    ),
    Kind(
        "a gradient of zeros", at.gradients, do.gradient_of_zeros, "reduces, replicas, same values"
    ),
    Kind("a gradient rounded", at.gradients, do.gradient_rounded, "reduces, replicas, same values"),
    Kind(
        "a summand of a gradient dropped",
        at.where(at.sums, lambda place: place[0].meta["phase"] == "backward"),
        do.summand_dropped,
        "same values",
    ),
    Kind(
        "two gradients exchanged",
        at.pairs_of_results("grads"),
        do.result("grads", do.swap),
        "reduces",
    ),
    Kind(
        "one gradient returned for another",
        at.pairs_of_results("grads"),
        do.result("grads", do.copy_first),
        "reduces",
    ),
    Kind(
        "a gradient returned as None",
        at.returned("grads"),
        do.result("grads", do.forget),
        "reduces",
    ),
    Kind(
        "the last gradient not returned",
        at.last_result("grads"),
        do.result("grads", do.drop_last),
        "layout",
    ),
    Kind(
        "a gradient doubled where it is returned",
        at.returned("grads"),
        do.result_through("grads", aten.mul.Tensor, 2),
        "copies, reduces",
    ),
    Kind(
        "two outputs exchanged",
        at.pairs_of_results("outputs"),
        do.result("outputs", do.swap),
        "same values",
    ),
    Kind(
        "one output returned for another",
        at.pairs_of_results("outputs"),
        do.result("outputs", do.copy_first),
        "same values",
    ),
    Kind(
        "an output returned as None",
        at.returned("outputs"),
        do.result("outputs", do.forget),
        "unchanged",
    ),
    Kind(
        "the last output not returned",
        at.last_result("outputs"),
        do.result("outputs", do.drop_last),
        "layout",
    ),
    Kind(
        "an output doubled where it is returned",
        at.returned("outputs"),
        do.result_through("outputs", aten.mul.Tensor, 2),
        "same values",
    ),
    Kind(
        "two mutations exchanged",
        at.pairs_of_results("mutations"),
        do.result("mutations", do.swap),
        "same values",
    ),
    Kind(
        "one mutation returned for another",
        at.pairs_of_results("mutations"),
        do.result("mutations", do.copy_first),
        "same values",
    ),
    Kind(
        "a mutation returned as None",
        at.returned("mutations"),
        do.result("mutations", do.forget),
        "unchanged",
    ),
    Kind(
        "the last mutation not returned",
        at.last_result("mutations"),
        do.result("mutations", do.drop_last),
        "layout",
    ),
    Kind(
        "a mutation doubled where it is returned",
        at.returned("mutations"),
        do.result_through("mutations", aten.mul.Tensor, 2),
        "same values",
    ),
    Kind(
        "two gradients of inputs exchanged",
        at.pairs_of_results("input_grads"),
        do.result("input_grads", do.swap),
        "same values",
    ),
    Kind(
        "one gradient of an input returned for another",
        at.pairs_of_results("input_grads"),
        do.result("input_grads", do.copy_first),
        "same values",
    ),
    Kind(
        "a gradient of an input returned as None",
        at.returned("input_grads"),
        do.result("input_grads", do.forget),
        "same values",
    ),
    Kind(
        "the last gradient of an input not returned",
        at.last_result("input_grads"),
        do.result("input_grads", do.drop_last),
        "layout",
    ),
    Kind(
        "a gradient of an input doubled where it is returned",
        at.returned("input_grads"),
        do.result_through("input_grads", aten.mul.Tensor, 2),
        "same values",
    ),
    Kind(
        "a gradient returned before its reduce",
        at.reduced_grads,
        do.result("grads", do.returns(do.before_its_reduce)),
        "copies, reduces",
    ),
    Kind(
        "a mutated tensor returned as it was",
        at.returned("mutations"),
        do.result("mutations", do.returns(do.as_it_entered)),
        "same values",
    ),
    # -- tables ------------------------------------------------------------------------------------
    Kind(
        "two parameters exchanged",
        at.pairs_of_entries("params"),
        do.table("params", do.swap_entries),
        "layout",
    ),
    Kind(
        "two buffers exchanged",
        at.pairs_of_entries("buffers"),
        do.table("buffers", do.swap_entries),
        "layout",
    ),
    Kind(
        "two inputs exchanged",
        at.pairs_of_entries("inputs"),
        do.table("inputs", do.swap_entries),
        "layout",
    ),
    Kind(
        "two tangents exchanged",
        at.pairs_of_entries("outputs"),
        do.table("outputs", do.swap_fields("tangent")),
        "layout",
    ),
    Kind(
        "two outputs named for each other",
        at.pairs_of_entries("outputs"),
        do.table("outputs", do.swap_fields("path")),
        "unchanged",
    ),
    Kind(
        "two mutated tensors named for each other",
        at.pairs_of_entries("mutations"),
        do.table("mutations", do.swap_fields("name", "target")),
        "unchanged",
    ),
    Kind(
        "two parameters named for each other",
        at.pairs_of_entries("params"),
        do.table("params", do.swap_fields("fqn", "names")),
        "copies, gathers, reduces",
    ),
    Kind(
        "readers of two parameters exchanged",
        at.pairs_of_entries("params"),
        do.placeholders_exchanged("params"),
        "copies, gathers, same values",
    ),
    Kind(
        "readers of two buffers exchanged",
        at.pairs_of_entries("buffers"),
        do.placeholders_exchanged("buffers"),
        "same values",
    ),
    Kind(
        "readers of two inputs exchanged",
        at.pairs_of_entries("inputs"),
        do.placeholders_exchanged("inputs"),
        "same values",
    ),
    Kind(
        "readers of two tangents exchanged",
        at.pairs_of_entries("outputs"),
        do.placeholders_exchanged("outputs", "tangent"),
        "same values",
    ),
    Kind(
        "a parameter frozen",
        at.entries("params", lambda entry: entry.requires_grad),
        do.table("params", do.field("requires_grad", lambda flag: False)),
        "reduces, unchanged",
    ),
    Kind(
        "a parameter trained",
        at.entries("params", lambda entry: not entry.requires_grad),
        do.table("params", do.field("requires_grad", lambda flag: True)),
        "unchanged",
    ),
    Kind(
        "a parameter ignored",
        at.entries("params"),
        do.table("params", do.field("ignored", lambda flag: True)),
        "operands, unchanged",
    ),
    Kind(
        "a parameter of other strides",
        at.entries("params"),
        do.table("params", do.field("stride", lambda stride: (7, *stride[1:]))),
        "unchanged",
    ),
    Kind(
        "a parameter of another dtype",
        at.entries("params"),
        do.table("params", do.field("dtype", lambda dtype: torch.float64)),
        "unchanged",
    ),
    Kind(
        "a constant of other values",
        constants,
        do.table("buffers", do.field("value", lambda value: value + 1)),
        "constants",
    ),
    Kind(
        "a constant with one bit changed",
        constants,
        do.table("buffers", do.field("value", do.one_bit)),
        "constants",
    ),
    Kind(
        "a constant of another dtype",
        constants,
        do.table("buffers", do.field("value", torch.Tensor.double)),
        "constants",
    ),
    Kind(
        "a constant of other strides",
        constants,
        do.table("buffers", do.field("value", do.of_other_strides)),
        "constants",
    ),
    Kind(
        "a constant without a value",
        constants,
        do.table("buffers", do.field("value", lambda value: None)),
        "constants",
    ),
    Kind(
        "an equal constant",
        constants,
        do.table("buffers", do.field("value", torch.clone)),
        "harmless",
    ),
    Kind(
        "values of constants exchanged",
        at.pairs_of_constants,
        do.table("buffers", do.swap_fields("value")),
        "constants, harmless",
    ),
    Kind(
        "a constant made a buffer",
        constants,
        do.table("buffers", do.field("constant", lambda flag: False)),
        "unchanged",
    ),
    Kind(
        "a buffer made a constant",
        at.entries("buffers", lambda entry: not entry.constant),
        do.table("buffers", do.field("constant", lambda flag: True)),
        "unchanged",
    ),
    Kind(
        "an input that needs no gradient",
        at.entries("inputs", lambda entry: entry.requires_grad),
        do.table("inputs", do.field("requires_grad", lambda flag: False)),
        "unchanged",
    ),
    Kind(
        "the training flag flipped",
        at.whole,
        do.attribute("training", lambda flag: not flag),
        "unchanged",
    ),
    Kind(
        "the grad flag flipped",
        at.whole,
        do.attribute("grad", lambda flag: not flag),
        "phases, unchanged",
    ),
    Kind(
        "another mesh", at.whole, do.attribute("mesh_shape", lambda mesh: (*mesh, 1)), "unchanged"
    ),
    Kind("on another device", at.whole, do.attribute("device", lambda device: "meta"), "unchanged"),
    Kind(
        "captured on another device",
        at.whole,
        do.attribute("capture_device", lambda device: "meta"),
        "unchanged",
    ),
    Kind("one stale parameter more or less", at.whole, do.stale_changed, "shards, unchanged"),
    Kind(
        "another note", at.whole, do.attribute("notes", lambda notes: (*notes, "note")), "harmless"
    ),
    # -- random numbers ----------------------------------------------------------------------------
    Kind("a draw repeated", at.draws, do.repeated_behind, "same values"),
    Kind("a draw repeated before", at.draws, do.repeated_before, "same values"),
    Kind("a reader draws again", at.draws, do.repeated_for_a_reader, "same values"),
    Kind(
        "two draws exchanged in order",
        at.draws_in_order,
        do.first_behind_second,
        "metadata, same values",
    ),
    Kind(
        "masks read for each other",
        at.where(at.pairs_of(at.masks), at.readers_behind),
        do.exchanged,
        "same values",
    ),
    Kind("a draw dropped", dropouts, do.draw_dropped, "metadata, same values"),
    Kind(
        "another probability",
        at.named_arguments(aten.native_dropout.default, "p"),
        do.argument(lambda p: p / 2),
        "same values",
    ),
    Kind(
        "a draw said not to train",
        at.named_arguments(aten.native_dropout.default, "train"),
        do.argument(lambda train: not train),
        "same values",
    ),
    Kind(
        "states of two repeated draws exchanged",
        at.pairs_of(at.replays),
        do.arguments_exchanged,
        "same values",
    ),
    Kind("a state put back before the draw", at.replays, do.put_back_at_once, "same values"),
    Kind(
        "a repeated draw before its state",
        at.draws_again,
        do.drawn_before_the_state,
        "metadata, same values",
    ),
    Kind("a state saved behind the draw", at.repeated_draws, do.state_saved_behind, "same values"),
    Kind(
        "a state saved before other draws",
        at.repeated_draws,
        do.state_saved_first,
        "same values",
    ),
    Kind(
        "a state of another device's generator",
        calls(*ops.RANDOM_STATES),
        do.keyword("device", lambda *_: "cuda"),
        "random states",
    ),
    Kind(
        "said to repeat another draw",
        at.draws_again,
        do.meta("replays", lambda name: f"{name}_1"),
        "same values",
    ),
    Kind(
        "not said to repeat a draw",
        at.draws_again,
        do.meta("replays", lambda name: None),
        "same values",
    ),
    Kind(
        "another mask's scale in recomputation",
        at.recomputed_scales,
        do.argument(lambda scale: scale * 2),
        "same values",
    ),
    # -- compute -----------------------------------------------------------------------------------
    Kind(
        "an operand exchanged for another of its shape",
        at.other_operands,
        do.reads_another,
        "lifetimes, releases, same values, unchanged",
    ),
    Kind(
        "a recomputed operand exchanged for another",
        at.where(at.other_operands, lambda place: at.is_recomputed(place[0])),
        do.reads_another,
        "releases, same values, unchanged",
    ),
    Kind("operands reversed", at.noncommutative, do.operands_reversed, "same values"),
    Kind(
        "a sum as a difference", calls(aten.add.Tensor), do.other_op(aten.sub.Tensor), "same values"
    ),
    Kind(
        "a product as a quotient",
        calls(aten.mul.Tensor),
        do.other_op(aten.div.Tensor),
        "same values",
    ),
    Kind("an operator bypassed", at.bypassable, do.cast_dropped, "scales, same values"),
    Kind("a value negated", at.read_floats, do.followed_by(aten.neg.default), "same values"),
    Kind("a value cloned", at.read_floats, do.followed_by(aten.clone.default), "harmless"),
    Kind(
        "a value written in place", at.read_floats, do.followed_by(aten.neg_.default), "same values"
    ),
    Kind(
        "another float argument",
        at.arguments(float),
        do.argument(lambda value: value * 2 + 1),
        "same values",
    ),
    Kind(
        "another int argument",
        at.arguments(int),
        do.argument(lambda value: value + 1),
        "same values",
    ),
    Kind("another flag", at.arguments(bool), do.argument(lambda value: not value), "same values"),
    Kind(
        "another list of sizes",
        at.lists,
        do.argument(lambda value: [*value[1:], value[0]]),
        "reduces, same values",
    ),
    Kind(
        "another eps",
        at.named_arguments(aten.native_layer_norm.default, "eps"),
        do.argument(lambda eps: eps * 10),
        "same values",
    ),
    Kind(
        "another causal flag", at.attention_flags, do.argument(lambda flag: not flag), "same values"
    ),
    Kind(
        "another dropout of attention",
        at.attention_dropout,
        do.argument(lambda p: 0.5),
        "same values",
    ),
    Kind(
        "another alpha",
        at.named_arguments(aten.add.Tensor, "alpha"),
        do.argument(lambda alpha: 2),
        "same values",
    ),
    Kind("another result picked", at.picked, do.next_pick, "same values"),
    Kind(
        "computed again in backward differently",
        at.recomputed,
        do.followed_by(aten.neg.default),
        "same values",
    ),
    Kind(
        "computed again for a reader",
        at.pure,
        do.repeated_for_a_reader,
        "layout, releases, regions, checks, harmless",
    ),
    Kind(
        "of another unit",
        at.compute,
        do.meta("unit", lambda unit: "layers.0" if unit != "layers.0" else "layers.1"),
        "regions, harmless",
    ),
    Kind("said to be of the other phase", at.compute, do.in_the_other_phase, "layout, phases"),
    Kind("above its operands", at.compute, do.above_its_operands, "layout, metadata"),
    Kind(
        "behind a reader",
        at.where(at.compute, lambda node: bool(node.users)),
        do.below_its_readers,
        "layout, metadata",
    ),
    Kind(
        "said to be of another shape",
        at.of_tensors,
        do.meta("val", do.other_shape),
        "reduces, shapes, unchanged",
    ),
    Kind(
        "said to be of another dtype",
        at.of_tensors,
        do.meta("val", do.other_dtype),
        "reduces, shapes, unchanged",
    ),
    Kind("without its value", at.compute, do.without_value, "metadata"),
    Kind("in another region", at.marked, do.meta("region", lambda region: region + 1), "regions"),
    Kind("in no region", at.marked, do.in_no_region, "regions"),
    Kind("a collective in a region", at.collectives_with_regions, do.in_a_region, "regions"),
    Kind("another size", at.size_uses, do.reads_another, "same values, unchanged"),
    Kind("a size of another dim", at.size_reads, do.argument(lambda dim: 1 - dim), "same values"),
    Kind("a size made a number", at.fixed_sizes, do.size_fixed, "same values, unchanged"),
)
"""The table; names of rows are unique."""
