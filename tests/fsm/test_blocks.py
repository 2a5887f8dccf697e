import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from novainfer.fsm.kv.blocks import BlockPool, Journal, block_name

NAMES = [bytes([i]) * 16 for i in range(4)]


class Model:
    """The pool as one would write it without a journal: copies of everything."""

    def __init__(self, num_blocks: int) -> None:
        self.owners = [0] * num_blocks
        self.names: dict[int, bytes] = {}

    def find(self, name: bytes) -> int | None:
        return next((b for b, n in self.names.items() if n == name), None)

    @property
    def num_available(self) -> int:
        return self.owners.count(0)


class Owner:
    """Takes blocks and gives them back, in the pool and in the model alike."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, 4)
        self.model = Model(num_blocks)
        self.held: list[int] = []
        self.expected: list[int] = []  # blocks that the step fills

    def act(self, op: str, at: int) -> None:
        pool, model = self.pool, self.model
        if op == "allocate" and model.num_available:
            block = pool.allocate()
            assert model.owners[block] == 0, "an owned block was given away"
            model.names.pop(block, None)
            model.owners[block] += 1
            self.held.append(block)
        elif op == "share":
            name = NAMES[at % len(NAMES)]
            block = pool.find(name)
            assert block == model.find(name)
            if block is not None:
                assert pool.is_cached(block) == (model.owners[block] == 0)
                pool.share(block)
                model.owners[block] += 1
                self.held.append(block)
        elif op == "name" and set(self.held) - set(self.expected):
            free = [block for block in self.held if block not in self.expected]  # a step fills a block once
            block, name = free[at % len(free)], NAMES[at % len(NAMES)]
            pool.expect(block, name)
            if model.find(name) is None and block not in model.names:
                model.names[block] = name
                self.expected.append(block)

    def release(self, at: int) -> None:
        if self.held:
            block = self.held.pop(at % len(self.held))
            self.pool.release([block])
            self.model.owners[block] -= 1

    def check(self) -> None:
        self.pool.check(self.held)
        assert self.pool.num_available == self.model.num_available
        for name in NAMES:
            assert self.pool.find(name) == self.model.find(name)


ops = st.tuples(st.sampled_from(["allocate", "share", "name"]), st.integers(0, 7))
steps = st.lists(
    st.tuples(
        st.lists(ops, max_size=6), st.sampled_from(["keep", "undo", "undo launched"]), st.lists(st.integers(0, 7))
    ),
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5), steps)
def test_a_pool_agrees_with_a_naive_model_and_undo_gives_back_what_was_there(num_blocks, steps):
    owner = Owner(num_blocks)
    for planned, then, releases in steps:
        before = owner.pool.fingerprint()
        held, owners, names = list(owner.held), list(owner.model.owners), dict(owner.model.names)
        journal = Journal()
        owner.expected.clear()
        owner.pool.open(journal)
        for op, at in planned:
            owner.act(op, at)
        owner.pool.close()
        owner.check()
        if then == "keep":
            owner.pool.commit(journal)
            for block in owner.expected:
                owner.pool.name(block, owner.model.names[block])
        else:
            taken = [b for b in owner.held[len(held) :] if b not in held]
            owner.pool.undo(journal, launched=then == "undo launched")
            owner.held, owner.model.owners = held, owners
            kept = {b: n for b, n in names.items() if owner.pool.find(n) == b}
            lost = names.keys() - kept.keys()
            assert lost <= set(taken), "a block that the step did not take lost its name"
            assert then == "undo launched" or owner.pool.fingerprint() == before
            owner.model.names = kept
        owner.check()
        for at in releases:
            owner.release(at)
        owner.check()


def cached_pool() -> tuple[BlockPool, int]:
    """A pool of one block, cached under a name."""
    pool = BlockPool(1, 4)
    block = pool.allocate()
    pool.name(block, NAMES[0])
    pool.release([block])
    return pool, block


def test_undo_of_a_launched_step_never_revives_what_may_have_been_overwritten():
    for launched in (False, True):
        pool, block = cached_pool()
        journal = Journal()
        pool.open(journal)
        assert pool.allocate() == block
        pool.close()
        pool.undo(journal, launched=launched)
        assert pool.find(NAMES[0]) == (None if launched else block)
        pool.check([])


def test_the_block_released_longest_ago_is_evicted_first():
    pool = BlockPool(3, 4)
    blocks = [pool.allocate() for _ in range(3)]
    for block, name in zip(blocks, NAMES, strict=False):
        pool.name(block, name)
    pool.release([blocks[1]])
    pool.release([blocks[0]])
    pool.release([blocks[2]])
    pool.share(blocks[1])  # used again, so it is the most recent when it comes back
    pool.release([blocks[1]])
    assert [pool.allocate() for _ in range(3)] == [blocks[0], blocks[2], blocks[1]]


def test_a_block_released_twice_is_a_programmers_error():
    pool, block = cached_pool()
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([block])


def test_blocks_are_not_released_while_a_step_is_planned():
    pool = BlockPool(1, 4)
    block = pool.allocate()
    pool.open(Journal())
    with pytest.raises(AssertionError, match="between steps only"):
        pool.release([block])


def test_two_blocks_of_equal_tokens_have_the_same_name_only_after_the_same_prefix():
    assert block_name(b"", [1, 2]) == block_name(b"", [1, 2])
    assert block_name(block_name(b"", [1]), [2]) != block_name(block_name(b"", [3]), [2])
    assert block_name(b"", [1, 2]) != block_name(b"", [2, 1])
