"""Other dims, copies, options per unit and ZeRO-1, on two ranks and on four."""

from __future__ import annotations

import pytest
from layouts import (
    LAYOUT,
    experts_are_split_along_another_dim,
    padding_is_avoided_by_itself,
    units_of_their_own_kind_train_alike,
)
from ranks import on_ranks
from zero1_ranks import (
    ZERO1,
    zero1_accumulates_without_gathering_again,
    zero1_gathers_only_what_has_changed,
    zero1_trains_as_one_process_and_fully_shard_do,
)

ALL = [*LAYOUT, *ZERO1]
# What differs in kind on four ranks: ranks without rows, copies, sums in more than one order.
ON_FOUR_RANKS = [
    experts_are_split_along_another_dim,
    padding_is_avoided_by_itself,
    units_of_their_own_kind_train_alike,
    zero1_trains_as_one_process_and_fully_shard_do,
    zero1_gathers_only_what_has_changed,
    zero1_accumulates_without_gathering_again,
]
REST = [check for check in ALL if check not in ON_FOUR_RANKS]

test_on_two_ranks = on_ranks(ALL, 2, timeout=500)
test_on_four_ranks = pytest.mark.slow(on_ranks(ON_FOUR_RANKS, 4, timeout=500))


test_the_rest_on_four_ranks = pytest.mark.slow(on_ranks(REST, 4, timeout=580))
