"""The texts by which ranks compare the methods that they call together."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from graphshard.module.on_all_ranks import on_all_ranks
from graphshard.runtime.agreement import Agreement
from graphshard.runtime.calls import listed
from graphshard.runtime.group import Group


class Module:
    def __init__(self):
        self.agreement = Agreement(Group(None, 0, 1, torch.device("cpu")))
        self._graphshard = SimpleNamespace(bindings=SimpleNamespace(agreement=self.agreement))

    @on_all_ranks("path", "optim", "scheduler", "keep", names=listed)
    def save(self, path, optim=None, scheduler=None, *, extra=None, keep=2, names=None):
        return self.agreement.text, names

    @on_all_ranks("name")
    def run(self, name, /, *args):
        return self.agreement.text

    @contextmanager
    @on_all_ranks("max_bytes")
    def lent(self, *, max_bytes=None):
        yield self.agreement.text


def test_the_text_has_what_differs_from_the_defaults():
    module = Module()
    assert module.save("a") == ("save('a')", None)
    assert module.save(Path("a"), keep=2, extra=object())[0] == "save('a')"
    assert module.save("a", keep=3)[0] == "save('a', keep=3)"
    assert module.run("search", torch.ones(1)) == "run('search')"


def test_an_object_is_shown_by_its_class():
    optim = torch.optim.SGD(nn.Linear(1, 1).parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 1)
    text = "save('a', optim=SGD, scheduler=StepLR)"
    assert Module().save("a", optim, scheduler)[0] == text


def test_what_is_converted_is_read_once():
    text, names = Module().save("a", names=iter(["b", "c"]))
    assert (text, names) == ("save('a', names=['b', 'c'])", ["b", "c"])


def test_a_context_is_one_call():
    module = Module()
    before = module.agreement.text
    with module.lent(max_bytes=3) as inside:
        assert inside == module.agreement.text == "lent(max_bytes=3)"
        assert module.run("inner") == "run('inner')"
        assert module.agreement.text == inside
    assert module.agreement.text == before


def test_a_wrong_argument_is_pythons_own_error():
    with pytest.raises(TypeError, match=r"Module.save\(\) got an unexpected keyword argument"):
        Module().save("a", kep=3)
