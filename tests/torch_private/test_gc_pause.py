"""What Python's garbage collector walks while programs are made."""

from __future__ import annotations

import gc

import pytest

from graphshard.torch_private.gc_pause import collect_only_new, pause_collections


class Cycle:
    """Refers to itself; counts those that are alive."""

    alive = 0

    def __init__(self) -> None:
        self.itself = self
        Cycle.alive += 1

    def __del__(self) -> None:
        Cycle.alive -= 1


@pytest.mark.slow
def test_what_was_there_is_not_walked_while_passes_run_and_is_afterwards() -> None:
    gc.collect()
    Cycle()
    with collect_only_new():
        assert gc.get_freeze_count() > 0
        Cycle()
        gc.collect()
        assert Cycle.alive == 1
        with collect_only_new():
            pass
        assert gc.get_freeze_count() > 0  # of the outer one
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert Cycle.alive == 0


def test_a_heap_that_somebody_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with collect_only_new():
            assert gc.get_freeze_count() <= frozen
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_collections_go_on_after_an_error() -> None:
    for paused in (collect_only_new, pause_collections):
        with pytest.raises(ZeroDivisionError), paused():
            raise ZeroDivisionError
        assert gc.get_freeze_count() == 0
        assert gc.isenabled()
    with pause_collections():
        assert not gc.isenabled()
    assert gc.isenabled()
