"""The arguments of a model's forward: what the user calls each tensor of a call."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field

from torch import nn

from graphshard.capture.structure import Structure

_POSITIONAL = re.compile(r"args\[(\d+)\](.*)", re.DOTALL)


_KEYWORD = re.compile(r"kwargs\['(\w+)'\](.*)", re.DOTALL)


@dataclass(frozen=True)
class Arguments:
    """The parameters of a forward."""

    parameters: tuple[str, ...]  # without *args and **kwargs
    rest: str | None  # the name of *args
    takes_any: bool  # has *args or **kwargs
    _labels: dict[Structure, tuple[str, ...]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, model: nn.Module) -> Arguments:
        """The arguments that the forward of `model` takes."""
        parameters: list[str] = []
        rest = None
        takes_any = False
        for name, parameter in inspect.signature(model.forward).parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                rest, takes_any = name, True
            elif parameter.kind is parameter.VAR_KEYWORD:
                takes_any = True
            else:
                parameters.append(name)
        return cls(tuple(parameters), rest, takes_any)

    def may_be_passed(self, name: str) -> bool:
        """Whether some call could pass a tensor of that name or path."""
        root = root_of(name)
        return self.takes_any or root in self.parameters or root in ("args", "kwargs")

    def labels(self, structure: Structure) -> tuple[str, ...]:
        """The path of each tensor, beginning with the parameter's name: "batch['ids']"."""
        labels = self._labels.get(structure)
        if labels is None:
            labels = self._labels[structure] = tuple(map(self._label, structure.paths))
        return labels

    def _label(self, path: str) -> str:
        if match := _KEYWORD.fullmatch(path):
            return match[1] + match[2]
        if match := _POSITIONAL.fullmatch(path):
            position = int(match[1])
            if position < len(self.parameters):
                return self.parameters[position] + match[2]
            return f"{self.rest}[{position - len(self.parameters)}]{match[2]}"
        return path


def root_of(label: str) -> str:
    """The argument that holds the tensor `label`."""
    return re.split(r"[\[.<]", label, maxsplit=1)[0]
