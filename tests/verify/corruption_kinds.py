"""Every kind of corruption of a finished program, and the rules that refuse it, in one table.

A row says where a program can be corrupted (`corruption_places`), how (`corruption_edits`), and the
rules of which one names the fault, depending on program and place. "harmless" among them says that
the corrupted program may be accepted; then it returns the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

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
    outcomes: str = "same values"  # names of rules, and HARMLESS, separated by commas

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


def made_by(edit: Edit, *rows: tuple[Any, ...]) -> tuple[Kind, ...]:
    """Rows of one edit: a name, where it is made, and the outcomes."""
    return tuple(Kind(name, places, edit, *outcomes) for name, places, *outcomes in rows)


def made_at(places: Places, *rows: tuple[Any, ...]) -> tuple[Kind, ...]:
    """Rows of one kind of places: a name, what is done there, and the outcomes."""
    return tuple(Kind(name, places, edit, *outcomes) for name, edit, *outcomes in rows)


gathers = calls(all_gather)
reduces = calls(*ops.REDUCES)
collectives = calls(*ops.COLLECTIVES)
waits = calls(wait)
fulls = at.results_of(all_gather)
shards = at.results_of(*ops.REDUCES)
ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
constants = at.entries("buffers", lambda entry: entry.constant)

# Edits of several rows.
constant_of = partial(do.field, "buffers", "value")
of_param = partial(do.field, "params")
flipped = do.argument(lambda flag: not flag)
halved = do.keyword("ranks", lambda node, ranks: ranks // 2)
other_form = do.keyword("of", do.other_form)
twice = do.through(aten.mul.Tensor, 2)
negative = do.through(aten.neg.default)


def results_of(
    results: str, one: str, many: str, changed: str, forgotten: str, doubled: str
) -> Iterator[Kind]:
    """Rows for one list of results; `changed`, `forgotten`, `doubled` are outcomes."""
    pairs, each_one = at.pairs_of_results(results), at.returned(results)
    last = one.split(" ", 1)[1]
    yield Kind(f"two {many} exchanged", pairs, do.result(results, do.swap), changed)
    yield Kind(
        f"one {last} returned for another", pairs, do.result(results, do.copy_first), changed
    )
    yield Kind(f"{one} returned as None", each_one, do.result(results, do.forget), forgotten)
    yield Kind(
        f"the last {last} not returned",
        at.last_result(results),
        do.result(results, do.drop),
        "layout",
    )
    yield Kind(
        f"{one} doubled where it is returned",
        each_one,
        do.returned_through(results, twice),
        doubled,
    )


RESULTS = (
    ("grads", "a gradient", "gradients", "reduces", "reduces", "copies, reduces"),
    ("outputs", "an output", "outputs", "same values", "unchanged", "same values"),
    ("mutations", "a mutation", "mutations", "same values", "unchanged", "same values"),
    ("input_grads", "a gradient of an input", "gradients of inputs", *["same values"] * 3),
)

_REDUCES = "reduce_scatter all_reduce"
_COLLECTIVES = f"all_gather {_REDUCES}"
_COPIES = "to_device to_host arrive"
_KEPT = "accumulate_grad add_accumulated"
_GRADIENTS = "reduces, replicas, same values"
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
            "layout, metadata": f"{_REDUCES} wait reshard to_host arrive {_KEPT}",
            "layout, metadata, releases": "release",
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
    *(
        Kind(
            f"a collective joins the group {name}",
            at.where(collectives, lambda node, name=name: ops.group_of(node) != name),
            do.keyword("group", lambda node, group, name=name: name),
            outcomes,
        )
        for name, outcomes in {
            "shard": "gathers, groups, reduces",
            "replicate": "groups",
            "all": "groups, reduces",
            "reshard": "gathers, groups",
        }.items()
    ),
    *made_at(
        at.equal_operands(collectives),
        (
            "two operands of a collective exchanged",
            do.operands_exchanged,
            "gathers, replicas, same values",
        ),
        (
            "two parameters of a collective exchanged",
            do.params_exchanged,
            "gathers, reduces, replicas",
        ),
        (
            "two operands and their parameters exchanged",
            do.operands_and_params_exchanged,
            "reduces, replicas, reshards, same values",
        ),
        ("an operand taken twice", do.operand_doubled, "gathers, replicas, same values"),
    ),
    *made_at(
        collectives,
        ("an operand dropped", do.operand_dropped, "operands, shapes"),
        (
            "a collective splits another dim",
            do.keyword("dims", lambda node, dims: (1,) * len(node.args[0])),
            "operands",
        ),
        (
            "a collective names a unit for too few operands",
            do.keyword(
                "units", lambda node, units: (node.kwargs["unit"],) * (len(node.args[0]) + 1)
            ),
            "operands",
        ),
    ),
    *made_at(
        at.where(at.of_one_shape(collectives), at.operands_before),
        ("operands of two collectives exchanged", do.swapped("args"), "gathers"),
        ("two collectives exchanged", do.swapped("args", "kwargs"), "order, reshards"),
    ),
    *made_by(
        do.exchanged,
        (
            "waits of two collectives exchanged",
            at.where(at.of_one_shape(collectives), at.readers_behind),
            "reduces, same values",
        ),
        (
            "a gather's full parameters exchanged",
            at.exchangeable(fulls),
            "lifetimes, reshards, same values",
        ),
        ("reduced shards exchanged", at.exchangeable(shards), _GRADIENTS),
        ("parts of a resharded parameter exchanged", at.exchangeable(calls(reshard)), "gathers"),
    ),
    Kind(
        "results picked from the other collective",
        at.pairs_of(waits),
        do.merged_waits,
        "lifetimes, reduces, releases, replicas, reshards, same values",
    ),
    Kind(
        "a gather in place",
        at.where(gathers, lambda node: "in_place" not in node.kwargs),
        do.keyword("in_place", lambda node, value: True),
        "gathers",
    ),
    Kind(
        "a gather into new buffers",
        at.where(gathers, lambda node: "in_place" in node.kwargs),
        do.keyword("in_place", lambda node, value: None),
        "gathers",
    ),
    Kind(
        "a gather of smaller groups",
        at.where(gathers, lambda node: "ranks" in node.kwargs),
        halved,
        "gathers",
    ),
    Kind("a reshard for smaller groups", calls(reshard), halved, "gathers"),
    Kind(
        "a gather's next result picked",
        at.where(fulls, at.has_others),
        do.next_picked,
        "releases, same values, shapes",
    ),
    Kind(
        "a reduce's next result picked",
        at.where(shards, at.has_others),
        do.next_picked,
        "reduces, replicas, same values, shapes",
    ),
    *made_at(
        calls(reduce_scatter),
        ("a reduce_scatter as an all_reduce", do.other_op(all_reduce), "groups, reduces"),
        ("a reduce_scatter as a gather", do.other_op(all_gather), "gathers, operands"),
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
    Kind("a free at the end of its phase", calls(free), do.at_the_end, "checks, harmless"),
    Kind("a release at the end", calls(release), do.at_the_end, "lifetimes"),
    Kind(
        "a free of another gather",
        at.where(at.pairs_in_one_phase(calls(free)), at.operands_before),
        do.swapped("args"),
        "lifetimes",
    ),
    Kind(
        "a release of another parameter",
        at.where(at.pairs_in_one_phase(calls(release)), at.operands_before),
        do.swapped("args"),
        "lifetimes, releases, harmless",
    ),
    # -- copies and transfers ----------------------------------------------------------------------
    *made_by(
        do.exchanged,
        (
            "copies that arrive exchanged",
            at.exchangeable(calls(arrive)),
            "gathers, reduces, same values",
        ),
        (
            "copies under way exchanged",
            at.exchangeable(calls(to_host, to_device)),
            "reduces, same values",
        ),
        ("casts exchanged", at.exchangeable(at.casts), "gathers, same values"),
    ),
    Kind(
        "sources of copies exchanged",
        at.where(at.pairs_of(calls(to_host, to_device)), at.operands_before),
        do.swapped("args"),
        "copies, reduces, same values",
    ),
    Kind("a copy in the other direction", calls(to_host), do.other_op(to_device), "copies"),
    Kind("a copy to the host, not to the device", calls(to_device), do.other_op(to_host), "copies"),
    *made_at(
        at.casts,
        ("a cast dropped", do.bypassed, "same values, shapes, unchanged"),
        ("a cast to float16", do.cast_elsewhere, "same values, shapes"),
    ),
    Kind("a value rounded", at.read_floats, do.all_read(do.rounded)),
    # -- accumulated gradients ---------------------------------------------------------------------
    Kind(
        "gradients kept for each other",
        at.where(at.pairs_of(calls(accumulate_grad)), at.operands_before),
        do.swapped("args"),
        "reduces, same values",
    ),
    Kind(
        "accumulated gradients added to each other",
        at.exchangeable(calls(add_accumulated)),
        do.exchanged,
        "replicas, same values",
    ),
    Kind(
        "accumulated gradients named for each other",
        at.pairs_of(calls(add_accumulated)),
        do.swapped("kwargs"),
    ),
    Kind(
        "kept gradients named for each other",
        at.pairs_of(calls(accumulate_grad)),
        do.swapped("kwargs"),
        "reduces, same values",
    ),
    Kind("kept in the other form", calls(accumulate_grad), other_form, "accumulated"),
    Kind("added in the other form", calls(add_accumulated), other_form, "accumulated"),
    # -- gradients ---------------------------------------------------------------------------------
    *(kind for rows in RESULTS for kind in results_of(*rows)),
    *made_at(
        at.gradients,
        ("a gradient doubled", do.one_reads(twice), _GRADIENTS),
        ("a gradient rounded", do.one_reads(do.rounded), _GRADIENTS),
    ),
    Kind(
        "a summand of a gradient dropped",
        at.where(at.sums, lambda place: place[0].meta["phase"] == "backward"),
        do.summand_dropped,
    ),
    Kind(
        "a gradient returned before its reduce",
        at.reduced_grads,
        do.returned_before_its_reduce,
        "copies, reduces",
    ),
    Kind(
        "a mutated tensor returned as it was", at.returned("mutations"), do.returned_as_it_entered
    ),
    # -- tables ------------------------------------------------------------------------------------
    *made_at(
        at.pairs_of_entries("params"),
        ("two parameters exchanged", do.table("params", do.swap), "layout"),
        (
            "two parameters named for each other",
            do.table("params", do.swap_fields("fqn", "names")),
            "copies, gathers, reduces",
        ),
        (
            "readers of two parameters exchanged",
            do.placeholders_exchanged("params"),
            "copies, gathers, same values",
        ),
    ),
    *(
        kind
        for table in ("buffers", "inputs")
        for kind in made_at(
            at.pairs_of_entries(table),
            (f"two {table} exchanged", do.table(table, do.swap), "layout"),
            (f"readers of two {table} exchanged", do.placeholders_exchanged(table)),
        )
    ),
    *made_at(
        at.pairs_of_entries("outputs"),
        ("two tangents exchanged", do.table("outputs", do.swap_fields("tangent")), "layout"),
        (
            "two outputs named for each other",
            do.table("outputs", do.swap_fields("path")),
            "unchanged",
        ),
        ("readers of two tangents exchanged", do.placeholders_exchanged("outputs", "tangent")),
    ),
    Kind(
        "two mutated tensors named for each other",
        at.pairs_of_entries("mutations"),
        do.table("mutations", do.swap_fields("name", "target")),
        "unchanged",
    ),
    Kind(
        "a parameter frozen",
        at.entries("params", lambda entry: entry.requires_grad),
        of_param("requires_grad", lambda flag: False),
        "reduces, unchanged",
    ),
    Kind(
        "a parameter trained",
        at.entries("params", lambda entry: not entry.requires_grad),
        of_param("requires_grad", lambda flag: True),
        "unchanged",
    ),
    *made_at(
        at.entries("params"),
        ("a parameter ignored", of_param("ignored", lambda flag: True), "operands, unchanged"),
        (
            "a parameter of other strides",
            of_param("stride", lambda stride: (7, *stride[1:])),
            "unchanged",
        ),
        (
            "a parameter of another dtype",
            of_param("dtype", lambda dtype: torch.float64),
            "unchanged",
        ),
    ),
    *made_at(
        constants,
        ("a constant of other values", constant_of(lambda value: value + 1), "constants"),
        ("a constant without a value", constant_of(lambda value: None), "constants"),
        ("an equal constant", constant_of(torch.clone), "constants"),
        (
            "a constant made a buffer",
            do.field("buffers", "constant", lambda flag: False),
            "unchanged",
        ),
    ),
    Kind(
        "values of constants exchanged",
        at.pairs_of_constants,
        do.table("buffers", do.swap_fields("value")),
        "constants, harmless",
    ),
    Kind(
        "a buffer made a constant",
        at.entries("buffers", lambda entry: not entry.constant),
        do.field("buffers", "constant", lambda flag: True),
        "unchanged",
    ),
    Kind(
        "an input that needs no gradient",
        at.entries("inputs", lambda entry: entry.requires_grad),
        do.field("inputs", "requires_grad", lambda flag: False),
        "unchanged",
    ),
    *made_at(
        at.whole,
        (
            "the training flag flipped",
            do.of_program("training", lambda flag: not flag),
            "unchanged",
        ),
        (
            "the grad flag flipped",
            do.of_program("grad", lambda flag: not flag),
            "phases, unchanged",
        ),
        ("another mesh", do.of_program("mesh_shape", lambda mesh: (*mesh, 1)), "unchanged"),
        ("on another device", do.of_program("device", lambda device: "meta"), "unchanged"),
        (
            "captured on another device",
            do.of_program("capture_device", lambda device: "meta"),
            "unchanged",
        ),
        (
            "one stale parameter more or less",
            do.of_program("stale", lambda stale: stale ^ {"embed.weight"}),
            "shards, unchanged",
        ),
        ("another note", do.of_program("notes", lambda notes: (*notes, "note")), "harmless"),
    ),
    # -- random numbers ----------------------------------------------------------------------------
    *made_at(
        at.draws,
        ("a draw repeated", do.repeated_behind, "same values"),
        ("a draw repeated before", do.repeated_before, "same values"),
        ("a reader draws again", do.repeated_for_a_reader),
    ),
    Kind(
        "two draws exchanged in order",
        at.draws_in_order,
        do.first_behind_second,
        "metadata, same values",
    ),
    Kind("masks read for each other", at.exchangeable(at.masks), do.exchanged),
    Kind("a draw dropped", at.dropouts, do.draw_dropped, "metadata, same values"),
    Kind("states of two repeated draws exchanged", at.pairs_of(at.replays), do.swapped("args")),
    Kind("a state put back before the draw", at.replays, do.put_back_at_once),
    *made_at(
        at.draws_again,
        ("a repeated draw before its state", do.drawn_before_the_state, "metadata, same values"),
        (
            "said to repeat another draw",
            do.meta("replays", lambda name: f"{name}_1"),
            "same values",
        ),
        ("not said to repeat a draw", do.meta("replays", lambda name: None)),
    ),
    *made_at(
        at.repeated_draws,
        ("a state saved behind the draw", do.state_saved_behind, "same values"),
        ("a state saved before other draws", do.state_saved_first),
    ),
    Kind(
        "a state of another device's generator",
        calls(*ops.RANDOM_STATES),
        do.keyword("device", lambda *_: "cuda"),
        "random states",
    ),
    # -- compute -----------------------------------------------------------------------------------
    *made_by(
        do.reads_another,
        (
            "an operand exchanged for another of its shape",
            at.other_operands,
            "lifetimes, releases, same values, unchanged",
        ),
        ("another size", at.size_uses, "same values, unchanged"),
    ),
    Kind("operands reversed", at.noncommutative, do.operands_reversed),
    Kind("a sum as a difference", calls(aten.add.Tensor), do.other_op(aten.sub.Tensor)),
    Kind("an operator bypassed", at.bypassable, do.bypassed, "scales, same values"),
    *made_at(
        at.read_floats,
        ("a value negated", do.all_read(negative), "same values"),
        ("a value cloned", do.all_read(do.through(aten.clone.default)), "harmless"),
        ("a value written in place", do.all_read(do.through(aten.neg_.default))),
    ),
    Kind("another float argument", at.arguments(float), do.argument(lambda value: value * 2 + 1)),
    Kind("another int argument", at.arguments(int), do.argument(lambda value: value + 1)),
    Kind("another flag", at.arguments(bool), flipped),
    Kind(
        "another list of sizes",
        at.lists,
        do.argument(lambda value: [*value[1:], value[0]]),
        "reduces, same values",
    ),
    Kind("another causal flag", at.named("is_causal", *ATTENTION), flipped),
    Kind("another alpha", at.named("alpha", aten.add.Tensor), do.argument(lambda alpha: 2)),
    Kind("another result picked", at.picked, do.next_picked),
    Kind("computed again in backward differently", at.recomputed, do.all_read(negative)),
    Kind(
        "computed again for a reader",
        at.pure,
        do.repeated_for_a_reader,
        "layout, releases, regions, checks, harmless",
    ),
    *made_at(
        at.compute,
        (
            "of another unit",
            do.meta("unit", lambda unit: "layers.0" if unit != "layers.0" else "layers.1"),
            "regions, harmless",
        ),
        ("said to be of the other phase", do.in_the_other_phase, "layout, phases"),
        ("above its operands", do.above_its_operands, "layout, metadata"),
        ("without its value", do.without("val"), "metadata"),
    ),
    Kind(
        "behind a reader",
        at.where(at.compute, lambda node: bool(node.users)),
        do.below_its_readers,
        "layout, metadata",
    ),
    *made_at(
        at.of_tensors,
        (
            "said to be of another shape",
            do.meta("val", do.other_shape),
            "reduces, shapes, unchanged",
        ),
        (
            "said to be of another dtype",
            do.meta("val", do.other_dtype),
            "reduces, shapes, unchanged",
        ),
    ),
    *made_at(
        at.marked,
        ("in another region", do.meta("region", lambda region: region + 1), "regions"),
        ("in no region", do.without("region"), "regions"),
    ),
    Kind(
        "a collective in a region",
        at.collectives_with_regions,
        do.meta("region", lambda region: 0),
        "regions",
    ),
    Kind("a size of another dim", at.size_reads, do.argument(lambda dim: 1 - dim)),
    Kind("a size made a number", at.fixed_sizes, do.size_fixed, "same values, unchanged"),
)
"""The table; names of rows are unique."""
