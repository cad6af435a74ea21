"""SHARD_OPTIMIZER (ZeRO-1), on two ranks and on four."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_tensors import full
from layouts import Experts, MoE
from ranks import checks_of, on_ranks
from state_checks import assert_same
from torch import Tensor, nn

import graphshard
from graphshard.errors import FingerprintError
from graphshard.program import ops
from graphshard.runtime import resident
from graphshard.torch_private import compat as torch_compat


def model() -> MoE:
    torch.manual_seed(3)
    return MoE()


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    ids = torch.randint(19, (2, 6), generator=generator)
    return ids[0], ids[1]


def take_steps(module: nn.Module, rank: int, steps: int) -> None:
    optim = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        module(*batch(rank, step)).backward()
        optim.step()
        optim.zero_grad()


def compiled(rank: int, strategy: str) -> graphshard.ShardedModule:
    policy = graphshard.BlockPolicy({Experts}, strategy=strategy, merge_below=0)
    return graphshard.compile(model(), policy, example_inputs=batch(rank, 0), check=True)


def zero1(rank: int) -> graphshard.ShardedModule:
    return compiled(rank, "SHARD_OPTIMIZER")


def gathers(program: graphshard.Program) -> list[Any]:
    return [node for node in program.nodes() if node.target is ops.all_gather]


def loss_of(module: nn.Module, rank: int, step: int = 0) -> Tensor:
    with torch.no_grad():
        return module(*batch(rank, step))


def loss_of_full(sharded: nn.Module, rank: int) -> Tensor:
    """The loss of the plain model with the parameters the ranks have."""
    alone = model()
    state = {name: full(param).detach() for name, param in sharded.named_parameters()}
    alone.load_state_dict(state, strict=False)
    return loss_of(alone, rank)


def zero1_gathers_only_what_has_changed(rank: int) -> None:
    sharded = zero1(rank)
    take_steps(sharded, rank, steps=3)
    # The second step gathers the frozen parameter once more, and keeps a copy of its rows.
    assert len(sharded.programs) == 2
    for program, frozen_too in zip(sharded.programs, (True, False), strict=True):
        gathered = gathers(program)
        assert [node.kwargs["unit"] for node in gathered] == ["", "blocks.0", "blocks.1"]
        assert all(node.kwargs["in_place"] for node in gathered)
        assert ("norm.weight" in gathered[0].kwargs["params"]) == frozen_too
        kinds = [event.op for event in program.schedule()]
        assert kinds.count("reduce_scatter") == 3
        assert "free" not in kinds
    for step in range(4):  # twice with a gather, and without one once copies are kept
        loss_of(sharded, rank, step)
    assert [len(gathers(program)) for program in sharded.programs] == [3, 3, 3, 0]
    assert torch.equal(loss_of(sharded, rank), loss_of_full(sharded, rank))


def zero1_accumulates_without_gathering_again(rank: int) -> None:
    # Of two batches the second of the first step comes before a copy of the rows is kept.
    for batches, gathered in ((3, [3, 0, 3]), (2, [3, 3, 0])):
        sharded, expected = zero1(rank), model()
        optims = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, expected)]
        size = dist.get_world_size()
        for step in range(5 - batches):
            for number in range(batches * step, batches * (step + 1)):
                sharded(*batch(rank, number)).backward()
                for other in range(size):
                    (expected(*batch(other, number)) / size).backward()
            for optim in optims:
                optim.step()
                optim.zero_grad()
        for name, param in sharded.named_parameters():
            torch.testing.assert_close(full(param), expected.get_parameter(name))
        assert [len(gathers(program)) for program in sharded.programs] == gathered


def zero1_stores_what_the_plan_says(rank: int) -> None:
    sharded = zero1(rank)
    storages = {}
    for param in sharded.parameters():
        storage = param.to_local().untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    assert sum(storages.values()) == sum(unit.sharded_bytes for unit in sharded.plan.units)
    loss_of(sharded, rank)
    take_steps(sharded, rank, steps=1)
    assert {p.to_local().untyped_storage().data_ptr() for p in sharded.parameters()} == set(
        storages
    )


def zero1_sees_every_way_a_parameter_is_written(rank: int) -> None:
    sharded = zero1(rank)
    weight = sharded.get_parameter("embed.weight")
    torch.manual_seed(rank)

    def in_place() -> None:
        weight.mul_(1.5)

    def by_local_part() -> None:
        weight.to_local().mul_(1.5)

    def into_a_state_dict() -> None:
        state = sharded.state_dict()
        loss_of(sharded, rank)
        state["embed.weight"].to_local().mul_(1.5)  # as checkpoints are read

    def by_loading() -> None:
        sharded.load_state_dict({n: full(p) * 1.5 for n, p in sharded.state_dict().items()})

    def by_loading_in_full() -> None:
        sharded.load_full_state_dict({n: full(p) * 1.5 for n, p in sharded.state_dict().items()})

    def by_assigning() -> None:
        state = {n: p * 1.5 for n, p in sharded.state_dict().items()}
        sharded.load_state_dict(state, assign=True)

    def by_local_tensor() -> None:
        torch_compat.set_local_tensor(weight, weight.to_local().clone() * 1.5)

    def with_all_of_it() -> None:
        with sharded.unsharded(writeback=True) as params:
            params["embed.weight"].mul_(1.5)

    writes = (
        *(in_place, by_local_part, into_a_state_dict, by_loading, by_loading_in_full),
        *(by_local_tensor, with_all_of_it, by_assigning),
    )
    require_seen(writes, sharded, rank)


def require_seen(
    writes: Sequence[Callable[[], None]], sharded: nn.Module, rank: int, calls: int = 0
) -> None:
    """Each of `writes`, made after so many more `calls`, changes the loss as in a plain model."""
    before = loss_of(sharded, rank)
    for write in writes:
        for _ in range(calls):
            assert torch.equal(loss_of(sharded, rank), before)
        with torch.no_grad():
            write()
        after = loss_of(sharded, rank)
        assert not torch.equal(after, before), write.__name__
        assert torch.equal(after, loss_of_full(sharded, rank)), write.__name__
        before = after


def zero1_sees_writes_that_leave_no_sign(rank: int) -> None:
    sharded = zero1(rank)
    weight = sharded.get_parameter("embed.weight")
    torch.manual_seed(rank)
    data = weight.data

    def by_data() -> None:
        weight.data.mul_(1.5)

    def by_data_taken_before() -> None:
        data.mul_(1.5)

    def by_foreach() -> None:
        torch._foreach_mul_([weight, sharded.get_parameter("norm.bias")], 1.5)

    def by_memory() -> None:
        weight.to_local().data.numpy()[:] *= 1.5

    def on_one_rank() -> None:
        if rank == 0:
            weight.to_local().data.mul_(1.5)

    def in_the_frozen_one() -> None:
        sharded.get_parameter("norm.weight").data.mul_(1.5)

    writes = (by_data, by_data_taken_before, by_foreach, by_memory, on_one_rank, in_the_frozen_one)
    require_seen(writes, sharded, rank)  # each after a gather
    require_seen(writes, sharded, rank, calls=2)  # each after a call without one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.complex128])
@pytest.mark.parametrize("start", [0, 4, 5])
def test_rows_are_compared_with_their_copy_wherever_they_begin(start: int, dtype: Any) -> None:
    rows = torch.arange(24).to(dtype)[start : start + 16]
    copied = rows.clone()
    assert not resident._differ([(rows, copied)])
    copied[7] += 1
    assert resident._differ([(rows, copied)])


class Branches(nn.Module):
    """One linear layer trains, the other evaluates, and both read `shared`."""

    def __init__(self) -> None:
        super().__init__()
        self.train_head = nn.Linear(5, 7)
        self.eval_head = nn.Linear(5, 7)
        self.shared = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        head = self.train_head if self.training else self.eval_head
        return head(x * self.shared)

    def bias(self) -> Tensor:
        return self.shared + 1


def evaluate(module: nn.Module, x: Tensor) -> Tensor:
    return module.eval()(x)


def train(module: nn.Module, x: Tensor) -> Tensor:
    return module.train()(x)


def call_part(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, graphshard.ShardedModule):
        return module.submodule_forward("eval_head", x)
    return module.get_submodule("eval_head")(x)


def call_bias(module: Any, x: Tensor) -> Tensor:
    if isinstance(module, graphshard.ShardedModule):
        return module.call_method("bias")
    return module.bias()


def scale(module: nn.Module) -> None:
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(1.5)


def zero1_notes_only_what_a_program_gathers(rank: int) -> None:
    x = torch.ones(2, 5)
    calls = (evaluate, train, call_part, call_bias)
    for first in calls:
        torch.manual_seed(3)
        expected = Branches()
        policy = graphshard.LambdaPolicy(lambda _: False, strategy="SHARD_OPTIMIZER")
        sharded = graphshard.compile(copy.deepcopy(expected), policy, check=True)
        for writes in range(2):
            for call in (first, *calls):
                with torch.no_grad():
                    got, want = call(sharded, x), call(expected, x)
                assert torch.equal(got, want), (first.__name__, call.__name__, writes)
            scale(sharded)
            scale(expected)


def zero1_rewrites_a_branch_only_for_parameters_that_it_reads(rank: int) -> None:
    policy = graphshard.LambdaPolicy(lambda _: False, strategy="SHARD_OPTIMIZER")
    sharded = graphshard.compile(Branches(), policy)
    x = torch.ones(2, 5)
    for _ in range(3):
        for training in (True, True, True, False, False, False):
            with torch.no_grad():
                sharded.train(training)(x)
        scale(sharded)
    # Each branch with a gather of its head and `shared`, with one of its head, and with none.
    assert [len(gathers(p)) for p in sharded.programs] == [1, 0, 1, 0]
    read = [set(gathers(p)[0].kwargs["params"]) for p in sharded.programs[::2]]
    assert read == [
        {"train_head.weight", "train_head.bias", "shared"},
        {"eval_head.weight", "eval_head.bias"},
    ]


def ranks_that_see_other_signs_are_refused(rank: int) -> None:
    sharded = zero1(rank)
    for _ in range(3):
        loss_of(sharded, rank)
    if rank == 0:
        scale(sharded)
    with pytest.raises(FingerprintError, match="rank 0 is about to begin 'forward"):
        loss_of(sharded, rank)


def zero1_sees_writes_into_a_view_that_outlives_its_state_dict(rank: int) -> None:
    sharded = zero1(rank)
    view = sharded.state_dict()["embed.weight"].to_local().flatten()[1:]
    gc.collect()
    before = loss_of(sharded, rank)
    with torch.no_grad():
        view.mul_(1.5)
    after = loss_of(sharded, rank)
    assert not torch.equal(after, before)
    assert torch.equal(after, loss_of_full(sharded, rank))


def zero1_gathers_between_a_forward_and_its_backward(rank: int) -> None:
    """A gather into the buffer that an earlier call's backward reads, of the values it has."""

    def nothing(_: graphshard.ShardedModule) -> None:
        pass

    def evaluate(sharded: graphshard.ShardedModule) -> None:
        sharded.eval()
        loss_of(sharded, rank, 5)
        sharded.train()

    def clear(sharded: graphshard.ShardedModule) -> None:
        for param in sharded.parameters():
            param.grad = None

    for between in (nothing, evaluate, clear):
        grads = []
        for strategy in ("SHARD_OPTIMIZER", "FULL_SHARD"):
            sharded = compiled(rank, strategy)
            first = sharded(*batch(rank, 1))
            between(sharded)
            second = sharded(*batch(rank, 2))
            second.backward()
            first.backward()
            trained_params = [(n, p) for n, p in sharded.named_parameters() if p.grad is not None]
            grads.append({name: full(param.grad) for name, param in trained_params})
        assert_same(*grads)


def zero1_goes_on_after_inference_mode(rank: int) -> None:
    params = []
    for strategy in ("SHARD_OPTIMIZER", "FULL_SHARD"):
        sharded = compiled(rank, strategy)
        with torch.inference_mode():  # the second call sees no sign of a change
            sharded(*batch(rank, 7))
            sharded(*batch(rank, 7))
        optim = torch.optim.SGD(sharded.parameters(), lr=0.1)
        for step in range(2):
            sharded(*batch(rank, step)).backward()
            optim.step()
            optim.zero_grad()
        params.append({name: full(p) for name, p in sharded.named_parameters()})
    assert_same(*params)


def zero1_starts_from_meta(rank: int) -> None:
    with torch.device("meta"):
        made = MoE()
    policy = graphshard.BlockPolicy({Experts}, strategy="SHARD_OPTIMIZER", merge_below=0)
    sharded = graphshard.compile(made, policy, check=True)
    sharded.init_weights(seed=1)
    assert torch.equal(loss_of(sharded, rank), loss_of_full(sharded, rank))
    for param in sharded.parameters():
        assert not full(param).isnan().any()


# The checks that differ in kind on four ranks: copies, sums in more than one order.
ON_FOUR = [
    zero1_gathers_only_what_has_changed,
    zero1_accumulates_without_gathering_again,
]
SLOW = [
    zero1_notes_only_what_a_program_gathers,
    zero1_sees_writes_into_a_view_that_outlives_its_state_dict,
    zero1_gathers_between_a_forward_and_its_backward,
    zero1_goes_on_after_inference_mode,
]

test_on_two_ranks = on_ranks(checks_of(globals(), but=SLOW), 2, timeout=500)
test_the_rest_on_two_ranks = pytest.mark.slow(on_ranks(SLOW, 2, timeout=500))
test_on_four_ranks = pytest.mark.slow(on_ranks(ON_FOUR, 4, timeout=500))
