"""Linear algebra in a captured program: eager's bits, and eager's errors on bad matrices."""

from __future__ import annotations

import pytest
import torch
from capture_models import Net, X, assert_same_as_eager, run_captured
from torch import nn

from graphshard.capture.entry import capture

MATRICES = {
    "inv": torch.linalg.inv,
    "cholesky": torch.linalg.cholesky,
    "solve": lambda a: torch.linalg.solve(a, a + 1),
    "eigh": lambda a: torch.linalg.eigh(a)[0],
    "qr": lambda a: torch.linalg.qr(a)[0],
    "slogdet": lambda a: torch.linalg.slogdet(a)[1],
}


@pytest.mark.parametrize("name", MATRICES)
def test_linear_algebra(name):
    w = nn.Parameter(3 * torch.eye(4) + 0.1 * torch.randn(4, 4))
    net = Net(lambda m, x: (MATRICES[name](m.w @ m.w.t()) * x[0, 0]).sum(), w=w)
    assert_same_as_eager(net, (X,))


def test_a_bad_matrix_is_an_error_of_the_step_as_of_eager():
    net = Net(lambda m, x: torch.linalg.inv(m.w).sum() * x.sum(), w=nn.Parameter(torch.eye(4)))
    captured = capture(net, (X,))
    run_captured(captured, net, (X,), {})
    with torch.no_grad():
        net.w.zero_()
    for run in (lambda: net(X), lambda: run_captured(captured, net, (X,), {})):
        with pytest.raises(torch.linalg.LinAlgError, match="could not be completed"):
            run()
