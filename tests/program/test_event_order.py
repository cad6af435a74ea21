"""The order of events, against what FSDP was observed to do."""

from __future__ import annotations

import pytest
import toy_programs as toys
from toy_programs import events

from graphshard.policy.units import Policy

# Observed in torch 2.13 for a root (embedding and head) with three blocks, second iteration.
# AG = all_gather issued, F and B = compute in forward and backward (Bh: the head's),
# RS = reduce_scatter; "|" is the border. Waits and the root's other compute are left out.
FORWARD_EVENTS = "AG:root AG:0 F0 FREE:0 AG:1 F1 FREE:1 AG:2 F2 FREE:2 |"
OBSERVED = {
    "pre": (
        {"backward_prefetch": "pre"},
        f"{FORWARD_EVENTS} AG:2 Bh AG:1 B2 FREE:2 RS:2 AG:0 B1 FREE:1 RS:1 B0 FREE:0 RS:0 "
        "FREE:root RS:root",
    ),
    "post": (
        {"backward_prefetch": "post"},
        f"{FORWARD_EVENTS} Bh AG:2 B2 FREE:2 AG:1 RS:2 B1 FREE:1 AG:0 RS:1 B0 FREE:0 RS:0 "
        "FREE:root RS:root",
    ),
    "None": (
        {"backward_prefetch": None},
        f"{FORWARD_EVENTS} Bh AG:2 B2 FREE:2 RS:2 AG:1 B1 FREE:1 RS:1 AG:0 B0 FREE:0 RS:0 "
        "FREE:root RS:root",
    ),
    "forward_prefetch 1": (
        {"forward_prefetch": 1},
        "AG:root AG:0 AG:1 F0 FREE:0 AG:2 F1 FREE:1 F2 FREE:2 | AG:2 Bh AG:1 B2 FREE:2 RS:2 AG:0 "
        "B1 FREE:1 RS:1 B0 FREE:0 RS:0 FREE:root RS:root",
    ),
    "SHARD_GRAD_OP": (
        {"strategy": "SHARD_GRAD_OP"},
        "AG:root AG:0 F0 AG:1 F1 AG:2 F2 | Bh B2 FREE:2 RS:2 B1 FREE:1 RS:1 B0 FREE:0 RS:0 "
        "FREE:root RS:root",
    ),
    "reshard_root": (
        {"reshard_root": True},
        "AG:root AG:0 F0 FREE:0 AG:1 F1 FREE:1 AG:2 F2 FREE:2 FREE:root | AG:root AG:2 Bh AG:1 B2 "
        "FREE:2 RS:2 AG:0 B1 FREE:1 RS:1 B0 FREE:0 RS:0 FREE:root RS:root",
    ),
}


@pytest.mark.parametrize("name", OBSERVED)
def test_schedule_is_as_observed(name: str) -> None:
    fields, expected = OBSERVED[name]
    program, _ = toys.rewritten(toys.blocks, Policy(**fields))
    assert events(program) == expected


def test_forward_prefetch_goes_as_far_ahead_as_asked() -> None:
    program, _ = toys.rewritten(toys.blocks, Policy(forward_prefetch=2))
    assert events(program).split(" | ")[0] == (
        "AG:root AG:0 AG:1 AG:2 F0 FREE:0 F1 FREE:1 F2 FREE:2"
    )


def test_prefetch_never_gathers_a_unit_twice_at_once() -> None:
    program, _ = toys.rewritten(toys.back_and_forth, Policy(forward_prefetch=2))
    assert events(program).split(" | ")[0] == (
        "AG:root AG:a AG:b Fa FREE:a AG:a Fb FREE:b Fa FREE:a FREE:root"
    )


def test_nested_units_are_held_while_what_is_inside_them_runs() -> None:
    program, _ = toys.rewritten(toys.nested, Policy(backward_prefetch=None))
    assert events(program) == (
        "AG:root AG:tower AG:tower.0 Ftower.0 FREE:tower.0 Ftower AG:tower.1 Ftower.1 FREE:tower.1 "
        "FREE:tower AG:top Ftop FREE:top FREE:root | AG:top Btop FREE:top RS:top "
        "AG:tower AG:tower.1 Btower.1 FREE:tower.1 RS:tower.1 Btower AG:tower.0 Btower.0 "
        "FREE:tower.0 RS:tower.0 FREE:tower RS:tower RS:root"
    )


def test_post_prefetch_past_the_end_of_nested_units() -> None:
    program, _ = toys.rewritten(toys.nested, Policy(backward_prefetch="post"))
    assert events(program).split(" | ")[1] == (
        "AG:top Btop FREE:top AG:tower RS:top AG:tower.1 Btower.1 FREE:tower.1 AG:tower.0 "
        "RS:tower.1 Btower Btower.0 FREE:tower.0 RS:tower.0 FREE:tower RS:tower RS:root"
    )
