"""Code whose arguments come in one list, which it empties."""

from __future__ import annotations

from typing import Any

from torch.fx.graph import CodeGen


class BoxedCodeGen(CodeGen):
    """Code whose one argument is the list of all arguments, emptied on entry."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        """The head of the function: unpack the list, then empty it."""
        names = [name.partition(":")[0].partition("=")[0].strip() for name in free_vars]
        lines = [f"def forward(self, args){maybe_return_annotation}:"]
        if names:
            lines.append(f"    {', '.join(names)}, = args")
        return "\n".join([*lines, "    args.clear()"])
