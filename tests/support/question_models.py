"""Forwards that decide by values. Not in a test's own file, where pytest rewrites each `assert`."""

from __future__ import annotations

import sys

import torch

from graphshard.capture.raising import raising_answer

# -- a branch that raises -------------------------------------------------------------------------


def asserts(m, x, mask):
    assert (mask >= 0).all()
    return m.fc(x)


def asserts_not(m, x, mask):
    assert not (mask < 0).any()
    return m.fc(x)


def asserts_both(m, x, mask):
    assert mask.min() >= 0 and mask.max().item() < 7, f"not so: {mask}"  # noqa: PT018
    return m.fc(x)


def raises(m, x, mask):
    if mask.sum() < 0:
        raise ValueError(f"{mask} is {'wrong' if len(x) else 'empty'}")
    return m.fc(x)


def raises_unless(m, x, mask):
    if (mask >= 0).all():
        y = m.fc(x)
    else:
        raise ValueError("negative")
    return y


def asserts_on_activations(m, x, mask):
    y = m.fc(x)
    assert y.isnan().sum() == 0
    return y * mask


def asserts_if_hot(m, x):
    y = m.fc(x)
    if y.sum() > 0:
        assert y.sum() > -1
        return y.sin()
    assert y.sum() < 1
    return y


def turns_if_hot(m, x, mask):
    y = m.fc(x)
    return y.sin().exp() if y[0, 0] > 0 else y.cos() * mask


def distribution(m, x, mask):
    return torch.distributions.Poisson(torch.nn.functional.softplus(m.fc(x))).log_prob(mask)


class Asked:
    """Asked for its truth, it notes which answer raises an error where that is asked."""

    answer: bool | None

    def __bool__(self):
        self.answer = raising_answer(sys._getframe(1))
        return False


def plain(value):
    assert value


def loops(value):
    while value:
        raise ValueError


def either(value, other=True):
    assert value or other


def both_ways(value):
    if value:
        raise ValueError
    raise AssertionError


def raises_if_more(value, more=0):
    if value:
        for _ in range(more):
            raise ValueError


def as_value(value):
    assert bool(value)


def many_ways(value):
    if value:
        raise ValueError(
            f"{1 if value else 2}{1 if value else 2}{1 if value else 2}{1 if value else 2}"
            f"{1 if value else 2}{1 if value else 2}{1 if value else 2}{1 if value else 2}"
            f"{1 if value else 2}{1 if value else 2}{1 if value else 2}{1 if value else 2}"
            f"{1 if value else 2}{1 if value else 2}{1 if value else 2}{1 if value else 2}"
            f"{1 if value else 2}{1 if value else 2}{1 if value else 2}{1 if value else 2}"
            f"{1 if value else 2}{1 if value else 2}{1 if value else 2}{1 if value else 2}"
            f"{1 if value else 2}{1 if value else 2}{1 if value else 2}{1 if value else 2}"
        )


def catches_itself(m, x, mask):
    y = m.fc(x)
    try:
        _refuse_negative(mask)
    except ValueError:
        y = y * 2
    return y


def _refuse_negative(mask):
    with torch.no_grad():
        if (mask < 0).any():
            raise ValueError("negative")


# -- answers by inputs and buffers ----------------------------------------------------------------


def hides(m, x, mask):
    y = m.fc(x)
    if not mask.all():
        y = y.masked_fill(mask == 0, 0.0)
    return y


def starts(m, x, mask):
    if not m.started:
        m.mean.copy_(x.mean(0))
        m.started.fill_(True)
    m.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return m.fc(x - m.mean)


def repeats(m, x, mask):
    y = m.fc(x)
    for _ in range(int(mask.sum(1).max()) // 2):
        y = m.fc(y)
    return y


def by_results_of_several(m, x, mask):
    longest, _ = mask.sum(1).max(0)
    if longest > 2 and mask.ne(0).any():
        x = x * longest
    return m.fc(x)


def rows_one_by_one(m, x, mask):
    for row in mask[:, 0].nonzero()[:, 0].tolist():
        x = x + m.fc(x)[row]
    return m.fc(x)


def values_one_by_one(m, x, mask):
    for value in mask.unique():
        x = x + m.fc(x) * value
    return m.fc(x)


def squeezes(m, x, mask):
    rows = x[mask[:, 0] > 0].squeeze(0)
    found = torch.squeeze(mask[:, 0].nonzero())
    return m.fc(x) + rows.sum(0) * rows.dim() + x[found].sum() * found.dim()


def unbinds(m, x, mask):
    for row in torch.unbind(mask[:, 0].nonzero()):
        x = x + m.fc(x)[row].sum(0) * row.dim()
    return m.fc(x)


def squeezes_rows_by_activations(m, x, mask):
    y = m.fc(x)
    rows = y[y[:, 0] > mask[0, 0]].squeeze()
    return y + rows.sum() * rows.dim()


def of_no_effect(m, x, mask):
    """`x.float()` is `x` itself."""
    y = m.fc(x) * x.float()
    return y * 2 if x.float().max() > 3 * mask.max() else y


def by_a_remainder(m, x, mask):
    n = mask.max().item()
    return m.fc(x) * n if n > 0 and 6 % n == 0 else m.fc(x)


def by_a_literal(m, x, mask):
    hidden = mask.clone()
    hidden[hidden > 1] = 0
    return m.fc(x) if hidden.any() else m.fc(x * 2)


def starting():
    return {"started": torch.tensor(False), "mean": torch.zeros(4)}


# -- answers that all ordinary numbers give -------------------------------------------------------


def clamps(m, x):
    y = m.fc(x)
    if not torch.isfinite(y).all() or y.abs().max() > 65_000:
        y = y.clamp(-1, 1)
    return y
