"""Block pool and scheduler: bookkeeping on the host, with tokens made up by the test."""

from __future__ import annotations

import random

import pytest

from cukern.engine.blocks import BlockPool, blocks_for
from cukern.engine.params import ResolvedSampling
from cukern.engine.scheduler import Scheduler
from cukern.engine.score import Scoring
from cukern.engine.sequence import Drawn, Sequence


def request(number: int, prompt: int, max_tokens: int = 8) -> Sequence:
    sampling = ResolvedSampling(0.0, 0, 1.0, 0.0, 0, max_tokens, (), frozenset(), False)
    return Sequence(number, list(range(prompt)), sampling, None)


def scheduler(num_blocks=8, block_size=4, max_num_seqs=4, max_batched_tokens=64) -> Scheduler:
    return Scheduler(BlockPool(num_blocks, block_size), max_num_seqs, max_batched_tokens)


def advance(scheduler: Scheduler):
    """One step whose tokens are the sequence's own length."""
    plan = scheduler.schedule()
    if plan is not None:
        drawn = [len(plan.sequences[i].tokens) for i in plan.sampled]
        scheduler.update(plan, map(Drawn, drawn))
    return plan


def check(scheduler: Scheduler) -> None:
    """Every block is free or held by exactly one live request, and requests hold what they have computed."""
    live = [*scheduler.running, *scheduler.waiting]
    held = [block for s in live for block in s.blocks]
    free = scheduler.pool._free
    assert sorted(held + free) == list(range(scheduler.pool.num_blocks))
    assert {s.number for s in live} == set(scheduler._live)
    for s in live:
        assert len(s.blocks) * scheduler.pool.block_size >= s.num_computed
        assert 0 <= s.num_computed < len(s.tokens)
    assert len(scheduler.running) <= scheduler.max_num_seqs


# -- block pool ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for(tokens, blocks):
    assert blocks_for(tokens, 4) == blocks


def test_pool_grows_tables_and_takes_blocks_back():
    pool = BlockPool(4, 4)
    table: list[int] = []
    assert pool.grow(table, 4)
    assert table == [0]
    assert pool.grow(table, 4)  # nothing to do
    assert pool.grow(table, 9)
    assert table == [0, 1, 2]
    other: list[int] = []
    assert not pool.grow(other, 5)  # two blocks, one is left
    assert other == []
    assert pool.num_free == 1
    pool.release(table)
    assert table == []
    assert pool.num_free == 4
    assert pool.grow(other, 16)
    assert sorted(other) == [0, 1, 2, 3]


def test_pool_rebuilds_from_the_tables():
    pool = BlockPool(5, 4)
    table: list[int] = []
    lost: list[int] = []
    pool.grow(table, 8)
    pool.grow(lost, 8)
    pool.rebuild([table])
    assert pool.num_free == 3
    assert not set(pool._free) & set(table)


# -- scheduler -----------------------------------------------------------------------------------------------------


def test_prompts_are_packed_then_everyone_decodes():
    s = scheduler()
    for number, length in enumerate([5, 3, 1]):
        s.add(request(number, length))
    plan = advance(s)
    assert (plan.counts, plan.is_decode, plan.sampled) == ([5, 3, 1], False, [0, 1, 2])
    plan = advance(s)
    assert (plan.counts, plan.is_decode) == ([1, 1, 1], True)
    check(s)


def test_a_long_prompt_is_computed_in_pieces():
    s = scheduler(max_batched_tokens=4)
    s.add(request(0, 10))
    s.add(request(1, 3))
    steps = []
    for _ in range(4):
        plan = advance(s)
        steps.append((plan.counts, [plan.sequences[i].number for i in plan.sampled]))
        check(s)
    assert steps == [([4], []), ([4], []), ([2, 2], [0]), ([1, 1], [0, 1])]


def test_requests_wait_for_blocks_and_for_their_turn():
    s = scheduler(num_blocks=4, block_size=4, max_num_seqs=8)
    for number, length in enumerate([8, 9, 1]):
        s.add(request(number, length, max_tokens=2))
    assert [r.number for r in advance(s).sequences] == [0]  # 1 does not fit beside it, and 2 does not overtake
    order = []
    while not s.idle:
        order.append([r.number for r in advance(s).sequences])
        check(s)
    assert order == [[0], [1], [1], [2], [2]]
    assert s.pool.num_free == 4


def test_max_num_seqs():
    s = scheduler(num_blocks=64, max_num_seqs=2)
    for number in range(5):
        s.add(request(number, 3))
    assert len(advance(s).sequences) == 2


def test_the_youngest_is_preempted_and_finishes_later():
    s = scheduler(num_blocks=5, block_size=4, max_num_seqs=4)
    requests = [request(number, 4, max_tokens=12) for number in range(2)]
    for r in requests:
        s.add(r)
    while not s.idle:
        assert advance(s) is not None
        check(s)
    assert s.num_preempted > 0
    for r in requests:
        assert r.finish_reason == "length"
        assert r.tokens == list(range(16))  # as if it had been alone
    assert s.pool.num_free == 5


def test_a_request_alone_may_fill_the_pool():
    s = scheduler(num_blocks=2, block_size=4)
    r = request(0, 1, max_tokens=7)
    s.add(r)
    while not s.idle:
        assert advance(s) is not None
        check(s)
    assert r.num_generated == 7
    assert s.num_preempted == 0


@pytest.mark.parametrize("length", [4, 8])
def test_a_prompt_of_whole_blocks_takes_no_block_too_many(length):
    s = scheduler(num_blocks=4, block_size=4)
    r = request(0, length)
    s.add(r)
    advance(s)
    assert len(r.blocks) == length // 4
    advance(s)
    assert len(r.blocks) == length // 4 + 1


def test_removing_twice_or_after_the_end_changes_nothing():
    s = scheduler()
    r, other = request(0, 6), request(1, 6)
    s.add(r)
    s.add(other)
    advance(s)
    for _ in range(2):
        s.remove(r)
        check(s)
    assert [x.number for x in s.running] == [1]


def test_a_step_that_was_never_booked_is_planned_again():
    s = scheduler()
    r = request(0, 6)
    s.add(r)
    first = s.schedule()
    s.recover()
    check(s)
    again = s.schedule()
    assert (first.counts, again.counts) == ([6], [6])


def test_recover_after_an_interruption_inside_the_pool():
    s = scheduler(num_blocks=6, block_size=4)
    running, waiting = request(0, 5), request(1, 5)
    s.add(running)
    advance(s)
    s.add(waiting)
    waiting.blocks.extend(s.pool._free[-2:])  # handed out, not yet struck off
    s.recover()
    check(s)
    assert s.running == [running]
    s.pool._free.clear()  # struck off, then lost
    s.recover(dropped=[running])
    check(s)
    assert s.pool.num_free == 6


def test_random_traffic_keeps_the_books():
    generator = random.Random(7)
    for _ in range(20):
        s = scheduler(
            num_blocks=generator.randrange(6, 12), max_num_seqs=4, max_batched_tokens=generator.choice([3, 7, 64])
        )
        everyone, number = [], 0
        for _ in range(120):
            action = generator.random()
            if action < 0.25 and number < 25:
                r = request(number, generator.randrange(1, 12), max_tokens=generator.randrange(1, 12))
                s.add(r)
                everyone.append(r)
                number += 1
            elif action < 0.3 and everyone:
                s.remove(generator.choice(everyone))
            else:
                advance(s)
            check(s)
        while not s.idle:
            assert advance(s) is not None
            check(s)
        assert s.pool.num_free == s.pool.num_blocks
        for r in everyone:
            if r.finish_reason is not None:
                assert r.num_generated == r.sampling.max_tokens
                assert r.tokens[r.num_prompt :] == list(range(r.num_prompt, len(r.tokens)))


def test_followers_share_the_blocks_of_their_prompt():
    s = scheduler(num_blocks=8, block_size=4, max_batched_tokens=6)
    first, second, third = (Scoring(i, list(range(9)), [1, 2], 1.0) for i in range(3))
    second.follows, third.follows = first, second
    for r in (first, second, third):
        s.add(r)
    plan = s.schedule()
    assert (plan.sequences, plan.counts, plan.sampled) == ([first], [6], [])  # its second block is not there yet
    s.update(plan, [])
    plan = s.schedule()
    assert (plan.sequences, plan.counts) == ([first, second], [4, 2])
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]
    assert s.pool.num_free == 8 - 3 - 1
    s.update(plan, [])
    assert first.finish_reason == second.finish_reason == "length"
    assert s.pool.num_free == 8
    plan = s.schedule()  # nothing to share any more
    assert (plan.sequences, plan.counts) == ([third], [6])
    s.update(plan, [])
    s.update(s.schedule(), [])
    assert s.idle
    assert s.pool.num_free == 8


def test_shared_blocks_are_free_when_the_last_owner_lets_go():
    pool = BlockPool(4, 4)
    one: list[int] = []
    two: list[int] = []
    three: list[int] = []
    assert pool.grow(one, 8)
    pool.share(one, two)
    pool.share(one[:1], three)
    assert pool.num_free == 2
    pool.release(one)
    assert pool.num_free == 2
    pool.rebuild([two, three])
    assert pool.num_free == 2
    pool.release(two)
    assert pool.num_free == 3
    pool.release(three)
    assert sorted(pool._free) == [0, 1, 2, 3]
    pool.rebuild([])
    assert pool.num_free == 4


def test_followers_start_again_after_an_interruption():
    s = scheduler(num_blocks=8, block_size=4, max_batched_tokens=64)
    first, second = (Scoring(i, list(range(9)), [1, 2], 1.0) for i in range(2))
    second.follows = first
    s.add(first)
    s.add(second)
    assert s.schedule().counts == [10, 2]
    s.recover()
    assert s.running == [first]
    assert (second.num_computed, second.blocks) == (0, [])
    assert s.schedule().counts == [10, 2]
    s.recover(dropped=[first])
    assert s.schedule().counts == [10]
    assert s.pool.num_free == 5
