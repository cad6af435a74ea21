"""Write the API reference, one page made of the docstrings: python .ci/api_page.py FILE."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from functools import cached_property
from pathlib import Path

from pdoc import doc, render

import graphshard

PARTS = ("ops", "hf", "lightning")


class Part(doc.Module):
    """A module of the package as a section of the page."""

    @cached_property
    def docstring(self) -> str:
        return f"@public{super().docstring}"  # pdoc leaves out modules without a page of their own

    @cached_property
    def own_members(self) -> list[doc.Doc]:
        return [member for member in super().own_members if member.docstring]


class Page(doc.Module):
    """Public functions, then classes, then the parts with what they define."""

    submodules = ()

    @cached_property
    def members(self) -> dict[str, doc.Doc]:
        public = sorted(super().members.items(), key=lambda item: item[1].kind == "class")
        return {**dict(public), **{name: Part(getattr(graphshard, name)) for name in PARTS}}

    @cached_property
    def flattened_own_members(self) -> list[doc.Doc]:
        return [
            section
            for member in self.members.values()
            for section in (member, *(member.own_members if isinstance(member, Part) else ()))
        ]


def members_shown(cls: doc.Class) -> list[doc.Doc]:
    """The members of a class, with those of its bases that have no section of their own."""
    public = [getattr(graphshard, name) for name in graphshard.__all__]
    elsewhere = {
        (base.__module__, base.__qualname__) for base in cls.obj.__mro__[1:] if base in public
    }
    return [
        member
        for member in cls.members.values()
        if member.taken_from[0].startswith("graphshard")
        and (member.taken_from[0], member.taken_from[1].rpartition(".")[0]) not in elsewhere
        and (member.name != "__init__" or dataclasses.is_dataclass(cls.obj))
    ]


def main(file: Path) -> None:
    # Constructors of policies name types of another module, which are shown as they are written.
    warnings.filterwarnings("ignore", "Error parsing type annotation")
    for module in (graphshard, *(getattr(graphshard, name) for name in PARTS)):
        for name in getattr(module, "__all__", ()):
            setattr(module, name, getattr(module, name))  # pdoc does not ask for lazy names
    graphshard.ShardedModule.forward = graphshard.ShardedModule.forward  # with its own signature
    doc.Class.own_members = property(members_shown)
    render.configure(docformat="google", show_source=False, search=False)
    page = Page(graphshard)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(render.html_module(page, {page.fullname: page}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
