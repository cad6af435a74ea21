"""`make docs`: its page has every name that users call, with its docstring."""

from __future__ import annotations

import html
import inspect
import re
from operator import attrgetter

import pytest
from example_runs import run

import graphshard

pytest.importorskip("pdoc")

CLASSES = [
    value for name in graphshard.__all__ if inspect.isclass(value := getattr(graphshard, name))
]


def methods_of(cls: type) -> list[str]:
    """The public methods and properties of a class, by the class that has them in the page."""
    return [
        f"{(base if base in CLASSES else cls).__name__}.{name}"
        for base in cls.__mro__
        if base.__module__.startswith("graphshard.")
        for name, value in vars(base).items()
        if not name.startswith("_") and hasattr(value, "__get__")
    ]


def text_of(section: str) -> str:
    return " ".join(html.unescape(re.sub("<[^>]*>", "", section)).split())


@pytest.mark.slow  # imports transformers and Lightning
def test_the_page_has_every_public_name_and_method(tmp_path):
    run(f".ci/api_page.py {tmp_path}/api.html")
    page = (tmp_path / "api.html").read_text()
    sections = dict(re.findall(r'id="([\w.]+)"(.*?)(?=<section|<div id="|\Z)', page, re.DOTALL))
    shown = {name: text_of(section) for name, section in sections.items()}
    methods = [method for cls in CLASSES for method in methods_of(cls)]
    assert len(methods) > 200
    assert {"ShardedModule.no_sync", "Estimate.report", "Policy.to_dict"} <= {*methods}
    parts = ["all_gather", "ShardedTrainer", "shard_models_of", "GraphShardStrategy"]
    assert not {*graphshard.__all__, *methods, *parts} - {*shown}
    assert not [name for name in shown if re.search(r"(^|\.)_(?!_init__$)", name)]
    for name in ("compile", "plan", "simulate", "ShardedModule.clip_grad_norm_"):
        function = attrgetter(name)(graphshard)
        assert text_of(inspect.getdoc(function).split("\n\n")[0].replace("`", "")) in shown[name]
        assert {*inspect.signature(function).parameters} <= {*re.findall(r"\w+", shown[name])}
        assert "Arguments:" in shown[name] or "Args:" not in function.__doc__
        assert "Raises:" in shown[name]
    assert "unknown" not in shown["ShardedModule.forward"], "no signature"
