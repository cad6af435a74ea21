"""Stage times, and bars that only a terminal sees."""

from __future__ import annotations

import io
import sys

import pytest

from graphshard.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(progress: Progress) -> None:
    with progress.stage("outer", total=2):
        for _ in range(2):
            with progress.stage("inner"):
                pass
            progress.advance()


def test_stages_are_timed_in_the_order_they_begin() -> None:
    progress = Progress(visible=False)
    work(progress)
    assert [(t.name, t.depth) for t in progress.times] == [("outer", 0), ("inner", 1), ("inner", 1)]
    assert progress.times[0].seconds >= progress.times[1].seconds + progress.times[2].seconds
    lines = progress.report().splitlines()
    assert [line.split(" s  ")[1] for line in lines] == ["outer", "  inner", "  inner"]


def test_a_stage_that_raises_is_closed_and_timed() -> None:
    progress = Progress(visible=False)
    with pytest.raises(KeyError), progress.stage("outer"), progress.stage("fails"):
        raise KeyError("x")
    with progress.stage("next"):
        pass
    assert [(t.name, t.depth) for t in progress.times] == [("outer", 0), ("fails", 1), ("next", 0)]


def test_nothing_is_drawn_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    work(Progress())
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_bars_are_drawn_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    progress = Progress()
    work(progress)
    with progress.stage("prints"):
        print("the result")  # must not end up on stderr with the bars
    assert capsys.readouterr().out == "the result\n"
    assert "outer" in terminal.getvalue()
    assert "inner" in terminal.getvalue()
    assert "2/2" in terminal.getvalue()


def test_only_rank_0_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    work(Progress())
    assert terminal.getvalue() == ""
