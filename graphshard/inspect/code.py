"""Write an fx graph as a Python file that can be read, imported and stepped through."""

from __future__ import annotations

import re
import types
from typing import Any

from torch import fx

# Names in fx's generated code that cannot be imported.
_DEFINED = {
    "inf": 'inf = float("inf")',
    "nan": 'nan = float("nan")',
    "NoneType": "NoneType = type(None)",
}


def graph_source(graph: fx.Graph, function: str, explanation: str) -> str:
    """Return the Python source of a module with a function that computes `graph`.

    Args:
        graph: its placeholders become the function's parameters, in order.
        function: the name of the function.
        explanation: the module's docstring.
    """
    code = graph.python_code("self")
    _, _, body = code.src.strip().partition("\n")
    parameters = "".join(f"    {node.target},\n" for node in graph.find_nodes(op="placeholder"))
    head = f"def {function}(\n{parameters}):" if parameters else f"def {function}():"
    body = "\n".join(line.rstrip() for line in body.splitlines())
    used = {name: value for name, value in code.globals.items() if re.search(rf"\b{name}\b", body)}
    imports = sorted(_binding(name, value) for name, value in used.items())
    docstring = explanation.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return "\n".join([f'"""{docstring}"""', "", *imports, "", "", head, body, ""])


def _binding(name: str, value: Any) -> str:
    """Return the line that binds the global `name` to `value`."""
    if name in _DEFINED:
        return _DEFINED[name]
    module = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    if isinstance(value, types.ModuleType):
        return f"import {module}" if module == name else f"import {module} as {name}"
    qualname = value.__qualname__
    return f"from {module} import {qualname}" + ("" if qualname == name else f" as {name}")
