"""Recurrent layers as eager runs them, where torch's tracing rules for them differ from eager.

Two differences, in torch 2.11 to 2.13: the rules leave out the dropout between stacked layers, and
run oneDNN's LSTM layer without the workspace that its backward reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from graphshard import torch_compat

_RULES = "torch._decomp.decompositions"


@contextlib.contextmanager
def stacked_layer_dropout() -> Iterator[None]:
    """Trace nn.LSTM, nn.GRU and nn.RNN with the dropout between their layers."""
    stack = torch_compat.private(_RULES, "_rnn_helper")

    def with_dropout(
        x: Tensor,
        hidden: Sequence[Any],
        params: Sequence[Any],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        layer: Any,
    ) -> tuple[Tensor, list[Any]]:
        x = x.transpose(0, 1) if batch_first else x
        directions = 2 if bidirectional else 1
        last_hidden: list[Any] = []
        for start in range(0, num_layers * directions, directions):
            if start and train and dropout:
                x = torch.dropout(x, dropout, train=True)
            own = slice(start, start + directions)
            x, found = stack(
                x, hidden[own], params[own], has_biases, 1, 0.0, train, bidirectional, False, layer
            )
            last_hidden += found
        return (x.transpose(0, 1) if batch_first else x), last_hidden

    with mock.patch(f"{_RULES}._rnn_helper", with_dropout):
        yield


def lstm_layer_with_workspace(*args: Any) -> tuple[Tensor, ...]:
    """An LSTM layer of oneDNN with its workspace, which ATen makes in grad mode only.

    Arguments and results are those of `aten.mkldnn_rnn_layer`.
    """
    with torch.enable_grad():
        return tuple(torch.ops.aten.mkldnn_rnn_layer.default(*args))


def keep_lstm_workspaces(graph: fx.Graph) -> None:
    """Give the LSTM layers of `graph` their workspace if their backward is in it."""
    backward = torch.ops.aten.mkldnn_rnn_layer_backward.default
    if graph.find_nodes(op="call_function", target=backward):
        forward = torch.ops.aten.mkldnn_rnn_layer.default
        for node in graph.find_nodes(op="call_function", target=forward):
            node.target = lstm_layer_with_workspace
