"""The inner loop of `remat.policies.solvers.search`: a sequence under edit, its memory, and the annealer.

Written once: run as it stands on Python lists, or compiled by numba on int64 arrays (`search_walk`), with the same
result to the bit. So there are only integers and IEEE sums and products, a generator of random numbers of its own,
a table instead of a logarithm, and flat rows of eight numbers instead of objects.

One module although it is long: numba's cache notices changes of the file that a function is in, not of those that
it calls, so with the functions in several files compiled code could be stale.

A *run* is one computation of a node. Handle `v` is node v's first run and always there; higher handles are
repetitions. Runs stand in *slots*, in order, with free slots between them, so that a run is inserted in O(1)
and sometimes a neighbourhood of slots is spread out again (Itai, Konheim, Rodeh 1981). Any sequence with the
first runs in order is valid (`problem.replay`); an edit changes only where copies end.

Memory is a segment tree over the slots. A run brings its result's bytes and takes away those of the copies it
reads last, so a tree node holds the sum of its slots and the largest live bytes within it, counted from its
left end: moving the end of a copy is a change of two leaves, the peak is at the root. This is a range-add
range-max tree kept as differences.

Arrays: `p` scalars, `f` float scalars, `r` rows of runs, `v` rows of nodes, `ins` and `use` the inputs and
users of nodes, `s` the run in each slot or -1, `t` the tree (sum and maximum of node i at 2i and 2i+1, the root
is 1), `reps` the repetitions, `free` unused handles (a stack), `dirty` slots whose leaves changed, `undo` the
edits of the proposal at hand, `todo` a work stack, `best` the best sequence, `table` of -log(u).
"""

from __future__ import annotations

from typing import Any

__all__ = ["FUNCTIONS", "load", "room", "run"]

Ints = Any  # a list of int, or an int64 array
Reals = Any  # a list of float, or a float64 array

# Scalars in `p`.
RNG, NODES, SLOTS, REPS, FREE, COST, BUDGET, DIRTY, UNDO, TODO, TURN = range(11)
BEST_OVER, BEST_COST, BEST_LENGTH, PENDING, PATIENCE = range(11, 16)
FEASIBLE, ACCEPTED, DONE, LENGTH, REORDER, LONGEST, EDITED = range(16, 23)
SCALARS = 32

# Scalars in `f`.
TEMPERATURE, PRICE, PRICE_STEP, PRICE_URGE, PRICE_LOW, PRICE_HIGH = range(6)

# Fields of a run's row.
NODE, POS, PREV, NEXT, END, OUT, INDEX = range(7)

# Fields of a node's row.
SIZE, OWN_COST, LAST, INPUTS, USERS, EXTRA, REPEATABLE = range(7)

MASK32 = (1 << 32) - 1
HUGE = 1 << 56
FLUSH_AT = 256
TABLE_BITS = 12

# What is proposed how often. All chosen by look, on the chains and graphs of `benchmarks/search.py`; every sequence
# is judged by its cost and peak alone, so they decide how soon a good one is found, not whether a plan is valid.
EDITS = 96  # most edits of one proposal, undo included
PERIOD = 128  # proposals between adjustments of the price
KINDS = 64  # of a proposal, drawn evenly; above the budget those below DROP drop a value across the peak
DROP = 40
TAKE, EXCHANGE, FIRST, ANYWHERE, BESIDE = (
    24,
    44,
    48,
    56,
    60,
)  # else: take out, exchange, move, recompute
EXCHANGES = 3  # values that an exchange drops at most
TRIES = 12  # at finding a value across the peak
RARE, SOMETIMES, EVEN = (
    24,
    64,
    128,
)  # chances out of 256 to keep what one would recompute, or the other way
REACHES, REACH = 6, 8  # a repetition moves by 8 slots, doubled up to 5 times at random
ORDER_REACHES, ORDER_REACH = 12, 4  # likewise of first runs
LENGTHS = 6  # a proposal makes 2 edits at most, doubled up to 5 times at random
MARKED = 64  # above the budget a sequence is better only if its excess is less by so small a part


def draw(p: Ints) -> int:
    """32 random bits by multiply-with-carry (Marsaglia), period about 2^62.

    No step exceeds 63 bits: signed overflow is undefined in compiled code.
    """
    x = p[RNG]
    x = (x & MASK32) * 2131995753 + (x >> 32)
    p[RNG] = x
    return (x ^ (x >> 32)) & MASK32


def below(p: Ints, count: int) -> int:
    """A random integer from 0 to `count - 1`; `count` is below 2^31."""
    return (draw(p) * count) >> 32


# --- the tree ---------------------------------------------------------------------------------------


def set_leaf(r: Ints, v: Ints, s: Ints, t: Ints, slots: int, slot: int) -> None:
    """Writes a slot's leaf from the run in it."""
    leaf = 4 * (slots + slot)
    run = s[slot]
    if run < 0:
        t[leaf] = 0
        t[leaf + 1] = 0
        t[leaf + 2] = 0
    else:
        node = 8 * r[8 * run + NODE]
        t[leaf] = v[node + SIZE] - r[8 * run + OUT]
        t[leaf + 1] = v[node + SIZE] + v[node + EXTRA]
        t[leaf + 2] = 1


def pull(t: Ints, i: int) -> None:
    """Recomputes tree node `i` from its children."""
    left = 8 * i
    total = t[left]
    low = t[left + 1]
    high = total + t[left + 5]
    t[4 * i] = total + t[left + 4]
    if low > high:
        t[4 * i + 1] = low
        t[4 * i + 2] = t[left + 2]
    elif low < high:
        t[4 * i + 1] = high
        t[4 * i + 2] = t[left + 6]
    else:
        t[4 * i + 1] = high
        t[4 * i + 2] = t[left + 2] + t[left + 6]


def mark(p: Ints, dirty: Ints, slot: int) -> None:
    """Notes that a slot's leaf is out of date."""
    dirty[p[DIRTY]] = slot
    p[DIRTY] += 1


def flush(p: Ints, r: Ints, v: Ints, s: Ints, t: Ints, dirty: Ints) -> None:
    """Brings the tree up to date, level by level, every ancestor of sorted leaves once."""
    count = p[DIRTY]
    p[DIRTY] = 0
    slots = p[SLOTS]
    if count <= 48:
        for i in range(1, count):
            slot = dirty[i]
            j = i - 1
            while j >= 0 and dirty[j] > slot:
                dirty[j + 1] = dirty[j]
                j -= 1
            dirty[j + 1] = slot
    for i in range(count):
        set_leaf(r, v, s, t, slots, dirty[i])
        dirty[i] += slots
    while count and dirty[0] > 1:
        kept = 0
        last = -1
        for i in range(count):
            parent = dirty[i] >> 1
            if parent != last:
                pull(t, parent)
                dirty[kept] = parent
                kept += 1
                last = parent
        count = kept


def peak_slot(p: Ints, t: Ints) -> int:
    """The first slot at which live bytes are largest."""
    slots = p[SLOTS]
    i = 1
    while i < slots:
        i *= 2
        if t[4 * i] + t[4 * i + 5] > t[4 * i + 1]:
            i += 1
    return i - slots


def range_max(p: Ints, t: Ints, low: int, high: int) -> int:
    """Largest live bytes over the slots `low <= slot < high` (not empty)."""
    slots = p[SLOTS]
    i = low + slots
    j = high + slots
    left_sum = 0  # of the pieces taken from the left so far
    left_max = -1
    right_max = -1
    while i < j:
        if i & 1:
            here = left_sum + t[4 * i + 1]
            if here > left_max:
                left_max = here
            left_sum += t[4 * i]
            i += 1
        if j & 1:
            j -= 1
            here = t[4 * j + 1]
            if right_max >= 0 and t[4 * j] + right_max > here:
                here = t[4 * j] + right_max
            right_max = here
        i >>= 1
        j >>= 1
    inside = left_max
    if right_max >= 0 and left_sum + right_max > inside:
        inside = left_sum + right_max
    # What is alive before `low`.
    before = 0
    i = low + slots
    while i > 1:
        if i & 1:
            before += t[4 * (i - 1)]
        i >>= 1
    return before + inside


# --- slots ------------------------------------------------------------------------------------------


def spread(p: Ints, r: Ints, v: Ints, s: Ints, t: Ints, todo: Ints, slot: int) -> None:
    """Spreads the runs around a slot, in the smallest aligned window that is not too full."""
    slots = p[SLOTS]
    width = 16
    level = 0
    while True:
        start = slot & ~(width - 1)
        count = 0
        for i in range(start, start + width):
            if s[i] >= 0:
                count += 1
        # At most half full, so that there is a free slot before every run; larger windows less.
        if width >= slots or count * 64 <= width * (32 - level):
            break
        width *= 2
        if level < 10:
            level += 1
    base = p[TODO]
    count = 0
    for i in range(start, start + width):
        if s[i] >= 0:
            todo[base + count] = s[i]
            count += 1
            s[i] = -1
    for i in range(count):
        at = start + ((2 * i + 1) * width) // (2 * count)
        s[at] = todo[base + i]
        r[8 * todo[base + i] + POS] = at
    for i in range(start, start + width):
        set_leaf(r, v, s, t, slots, i)
    low = start + slots
    high = low + width
    while low > 1:
        low >>= 1
        high = (high + 1) >> 1
        if high == low:
            high = low + 1
        for i in range(low, high):
            pull(t, i)


def slot_before(p: Ints, r: Ints, v: Ints, s: Ints, t: Ints, todo: Ints, run: int) -> int:
    """A free slot between a run and the one before it."""
    high = r[8 * run + POS] - 1
    if high < 0 or s[high] >= 0:
        spread(p, r, v, s, t, todo, high + 1)
        high = r[8 * run + POS] - 1
    low = high
    while low > 0 and high - low < 16 and s[low - 1] < 0:
        low -= 1
    return (low + high + 1) >> 1


def run_at_or_after(s: Ints, slot: int) -> int:
    """The first run from a slot on; there is one."""
    while s[slot] < 0:
        slot += 1
    return s[slot]


# --- copies and their uses --------------------------------------------------------------------------


def copy_before(r: Ints, v: Ints, node: int, slot: int) -> int:
    """The run whose copy of `node` is current just before a slot, -1 if there is none."""
    run = v[8 * node + LAST]
    while run >= 0 and r[8 * run + POS] >= slot:
        run = r[8 * run + PREV]
    return run


def last_use(r: Ints, v: Ints, use: Ints, copy: int, slot: int) -> int:
    """The last run before a slot that reads `copy`, itself if there is none."""
    node = r[8 * copy + NODE]
    found = copy
    where = r[8 * copy + POS]
    for i in range(v[8 * node + USERS], v[8 * node + 8 + USERS]):
        run = copy_before(r, v, use[i], slot)
        if run >= 0 and r[8 * run + POS] > where:
            found = run
            where = r[8 * run + POS]
    return found


def first_use(r: Ints, v: Ints, use: Ints, copy: int, slot: int) -> int:
    """The first run after a slot that reads `copy`, -1 if there is none."""
    node = r[8 * copy + NODE]
    until = r[8 * r[8 * copy + END] + POS]
    found = -1
    for i in range(v[8 * node + USERS], v[8 * node + 8 + USERS]):
        run = v[8 * use[i] + LAST]
        while run >= 0 and r[8 * run + POS] > slot:
            if r[8 * run + POS] <= until:
                until = r[8 * run + POS]
                found = run
            run = r[8 * run + PREV]
    return found


def move_end(p: Ints, r: Ints, dirty: Ints, copy: int, end: int, size: int) -> None:
    """Lets a copy end at another run."""
    old = r[8 * copy + END]
    r[8 * old + OUT] -= size
    r[8 * end + OUT] += size
    r[8 * copy + END] = end
    mark(p, dirty, r[8 * old + POS])
    mark(p, dirty, r[8 * end + POS])


# --- edits ------------------------------------------------------------------------------------------


def insert(
    p: Ints, r: Ints, v: Ints, ins: Ints, use: Ints, s: Ints, t: Ints, reps: Ints, free: Ints,
    dirty: Ints, todo: Ints, node: int, before: int,
) -> int:  # fmt: skip
    """Inserts a repetition of a node just before a run; returns its handle."""
    slot = slot_before(p, r, v, s, t, todo, before)
    p[FREE] -= 1
    new = free[p[FREE]]
    row = 8 * new
    size = v[8 * node + SIZE]
    s[slot] = new
    r[row + NODE] = node
    r[row + POS] = slot
    r[row + INDEX] = p[REPS]
    reps[p[REPS]] = new
    p[REPS] += 1
    p[LENGTH] += 1
    p[COST] += v[8 * node + OWN_COST]
    # The copy before it gives up its later readers.
    old = copy_before(r, v, node, slot)
    after = r[8 * old + NEXT]
    end = r[8 * old + END]
    if r[8 * end + POS] > slot:
        r[row + END] = end
        r[row + OUT] = 0
        last = last_use(r, v, use, old, slot)
        r[8 * old + END] = last
        r[8 * last + OUT] += size
        mark(p, dirty, r[8 * last + POS])
    else:
        r[row + END] = new
        r[row + OUT] = size
    r[row + PREV] = old
    r[row + NEXT] = after
    r[8 * old + NEXT] = new
    if after < 0:
        v[8 * node + LAST] = new
    else:
        r[8 * after + PREV] = new
    mark(p, dirty, slot)
    for i in range(v[8 * node + INPUTS], v[8 * node + 8 + INPUTS]):
        copy = copy_before(r, v, ins[i], slot)
        if r[8 * r[8 * copy + END] + POS] < slot:
            move_end(p, r, dirty, copy, new, v[8 * ins[i] + SIZE])
    if p[DIRTY] > FLUSH_AT:
        flush(p, r, v, s, t, dirty)
    return new


def delete(
    p: Ints, r: Ints, v: Ints, ins: Ints, use: Ints, s: Ints, t: Ints, reps: Ints, free: Ints,
    dirty: Ints, run: int,
) -> None:  # fmt: skip
    """Takes a repetition out; its readers read the copy before it."""
    row = 8 * run
    node = r[row + NODE]
    slot = r[row + POS]
    for i in range(v[8 * node + INPUTS], v[8 * node + 8 + INPUTS]):
        copy = copy_before(r, v, ins[i], slot)
        if r[8 * copy + END] == run:
            last = last_use(r, v, use, copy, slot)
            move_end(p, r, dirty, copy, last, v[8 * ins[i] + SIZE])
    old = r[row + PREV]
    after = r[row + NEXT]
    r[8 * old + NEXT] = after
    if after < 0:
        v[8 * node + LAST] = old
    else:
        r[8 * after + PREV] = old
    if r[row + END] != run:
        last = r[8 * old + END]
        r[8 * last + OUT] -= v[8 * node + SIZE]
        mark(p, dirty, r[8 * last + POS])
        r[8 * old + END] = r[row + END]
    s[slot] = -1
    r[row + POS] = -1
    mark(p, dirty, slot)
    p[REPS] -= 1
    moved = reps[p[REPS]]
    reps[r[row + INDEX]] = moved
    r[8 * moved + INDEX] = r[row + INDEX]
    p[LENGTH] -= 1
    p[COST] -= v[8 * node + OWN_COST]
    free[p[FREE]] = run
    p[FREE] += 1
    if p[DIRTY] > FLUSH_AT:
        flush(p, r, v, s, t, dirty)


def shift(
    p: Ints, r: Ints, v: Ints, ins: Ints, use: Ints, s: Ints, t: Ints, dirty: Ints, todo: Ints,
    node: int, before: int,
) -> None:  # fmt: skip
    """Moves a first run to just before another run, between its inputs' first runs and its readers."""
    slot = r[8 * node + POS]
    for i in range(v[8 * node + INPUTS], v[8 * node + 8 + INPUTS]):
        copy = copy_before(r, v, ins[i], slot)
        if r[8 * copy + END] == node:
            last = last_use(r, v, use, copy, slot)
            move_end(p, r, dirty, copy, last, v[8 * ins[i] + SIZE])
    s[slot] = -1
    mark(p, dirty, slot)
    slot = slot_before(p, r, v, s, t, todo, before)
    s[slot] = node
    r[8 * node + POS] = slot
    mark(p, dirty, slot)
    for i in range(v[8 * node + INPUTS], v[8 * node + 8 + INPUTS]):
        copy = copy_before(r, v, ins[i], slot)
        if r[8 * r[8 * copy + END] + POS] < slot:
            move_end(p, r, dirty, copy, node, v[8 * ins[i] + SIZE])
    if p[DIRTY] > FLUSH_AT:
        flush(p, r, v, s, t, dirty)


def add(
    p: Ints, r: Ints, v: Ints, ins: Ints, use: Ints, s: Ints, t: Ints, reps: Ints, free: Ints,
    dirty: Ints, undo: Ints, todo: Ints, node: int, before: int,
) -> int:  # fmt: skip
    """`insert`, noted in `undo`."""
    new = insert(p, r, v, ins, use, s, t, reps, free, dirty, todo, node, before)
    at = 3 * p[UNDO]
    undo[at] = 0
    undo[at + 1] = new
    p[UNDO] += 1
    return new


def take(
    p: Ints, r: Ints, v: Ints, ins: Ints, use: Ints, s: Ints, t: Ints, reps: Ints, free: Ints,
    dirty: Ints, undo: Ints, run: int,
) -> None:  # fmt: skip
    """`delete`, noted in `undo`."""
    at = 3 * p[UNDO]
    undo[at] = 1
    undo[at + 1] = r[8 * run + NODE]
    undo[at + 2] = run_at_or_after(s, r[8 * run + POS] + 1)
    p[UNDO] += 1
    delete(p, r, v, ins, use, s, t, reps, free, dirty, run)


def undo_all(
    p: Ints, r: Ints, v: Ints, ins: Ints, use: Ints, s: Ints, t: Ints, reps: Ints, free: Ints,
    dirty: Ints, undo: Ints, todo: Ints,
) -> None:  # fmt: skip
    """Takes back the edits of the proposal, the latest first, so that handles come out the same."""
    while p[UNDO] > 0:
        p[UNDO] -= 1
        at = 3 * p[UNDO]
        if undo[at] == 0:
            delete(p, r, v, ins, use, s, t, reps, free, dirty, undo[at + 1])
        elif undo[at] == 1:
            insert(
                p, r, v, ins, use, s, t, reps, free, dirty, todo, undo[at + 1], undo[at + 2]
            )  # fmt: skip
        else:
            shift(p, r, v, ins, use, s, t, dirty, todo, undo[at + 1], undo[at + 2])
    flush(p, r, v, s, t, dirty)


def take_unused(
    p: Ints, r: Ints, v: Ints, ins: Ints, use: Ints, s: Ints, t: Ints, reps: Ints, free: Ints,
    dirty: Ints, undo: Ints, todo: Ints, run: int,
) -> None:  # fmt: skip
    """Takes a repetition out, and then those nobody reads any more because of that."""
    base = p[TODO]
    todo[base] = run
    count = 1
    while count > 0 and p[UNDO] < EDITS:
        count -= 1
        run = todo[base + count]
        slot = r[8 * run + POS]
        node = r[8 * run + NODE]
        take(p, r, v, ins, use, s, t, reps, free, dirty, undo, run)
        for i in range(v[8 * node + INPUTS], v[8 * node + 8 + INPUTS]):
            copy = copy_before(r, v, ins[i], slot)
            if copy >= p[NODES] and r[8 * copy + END] == copy:
                todo[base + count] = copy
                count += 1


# --- proposals --------------------------------------------------------------------------------------


def recompute(
    p: Ints, r: Ints, v: Ints, ins: Ints, use: Ints, s: Ints, t: Ints, reps: Ints, free: Ints,
    dirty: Ints, undo: Ints, todo: Ints, node: int, before: int, limit: float, chance: int,
) -> bool:  # fmt: skip
    """Recomputes a node before a run, and of its inputs those that cannot be kept until then.

    An input whose copy would have to live longer is kept if the budget allows that, else recomputed too;
    `chance` out of 256 are decided the other way. False if the cost exceeds `limit` or it is too long.
    """
    base = p[TODO]
    todo[base] = node
    todo[base + 1] = before
    p[TODO] = base + 2
    # Of what is gained, this much may be spent on keeping inputs although memory is short.
    allowance = (v[8 * node + SIZE] * below(p, 256)) >> 8
    good = True
    asked = True  # the first is, the others follow from it
    while p[TODO] > base:
        p[TODO] -= 2
        node = todo[p[TODO]]
        before = todo[p[TODO] + 1]
        if r[8 * before + POS] < 0:
            continue  # taken out since it was noted
        old = copy_before(r, v, node, r[8 * before + POS])
        if not asked and r[8 * old + END] != before:
            continue  # another recomputation provides it
        asked = False
        new = add(
            p, r, v, ins, use, s, t, reps, free, dirty, undo, todo, node, before
        )  # fmt: skip
        if old >= p[NODES] and r[8 * old + END] == old:
            take_unused(p, r, v, ins, use, s, t, reps, free, dirty, undo, todo, old)
        if p[COST] > limit or p[UNDO] > p[LONGEST]:
            good = False
            break
        flushed = False
        for i in range(v[8 * node + INPUTS], v[8 * node + 8 + INPUTS]):
            read = ins[i]
            if v[8 * read + REPEATABLE] == 0:
                continue
            copy = copy_before(r, v, read, r[8 * new + POS])
            if r[8 * copy + END] != new:
                continue  # alive until later anyway
            last = last_use(r, v, use, copy, r[8 * new + POS])
            low = r[8 * last + POS] + 1
            high = r[8 * new + POS]
            if low >= high:
                continue
            if not flushed:
                flush(p, r, v, s, t, dirty)
                flushed = True
            over = range_max(p, t, low, high) > p[BUDGET]
            if below(p, 256) < chance:
                over = not over
            elif over and v[8 * read + SIZE] <= allowance:
                allowance -= v[8 * read + SIZE]
                over = False
            if over and p[TODO] < 2 * p[NODES] + base:
                todo[p[TODO]] = read
                todo[p[TODO] + 1] = new
                p[TODO] += 2
    p[TODO] = base
    return good


def pick_across(
    p: Ints, r: Ints, v: Ints, ins: Ints, use: Ints, s: Ints, todo: Ints, slot: int
) -> bool:
    """Looks for a copy alive at a slot and not read there; leaves node and next reader on `todo`."""
    span = p[SLOTS] - slot - 1
    top = r[8 * (p[NODES] - 1) + POS]
    span = top - slot
    if span <= 0:
        return False
    turn = 0
    if p[TURN] > 0:
        turn = r[8 * (p[TURN] - 1) + POS]
    for _ in range(TRIES):
        run = run_at_or_after(s, slot + 1 + below(p, span))
        where = r[8 * run + POS]
        if where < turn or (p[TURN] > 0 and run == p[TURN] - 1):
            continue
        node = r[8 * run + NODE]
        start = v[8 * node + INPUTS]
        count = v[8 * node + 8 + INPUTS] - start
        if count == 0:
            continue
        read = ins[start + below(p, count)]
        if v[8 * read + REPEATABLE] == 0:
            continue
        copy = copy_before(r, v, read, where)
        if r[8 * copy + POS] >= slot:
            continue
        if r[8 * last_use(r, v, use, copy, where) + POS] >= slot:
            continue
        todo[p[TODO]] = read
        todo[p[TODO] + 1] = run
        return True
    return False


def reorder(
    p: Ints, r: Ints, v: Ints, ins: Ints, use: Ints, s: Ints, t: Ints, dirty: Ints, undo: Ints, todo: Ints,
) -> bool:  # fmt: skip
    """Moves one random first run, the last node's excepted, to a random place where it may stand."""
    node = below(p, p[NODES] - 1)
    slot = r[8 * node + POS]
    low = -1
    for i in range(v[8 * node + INPUTS], v[8 * node + 8 + INPUTS]):
        if r[8 * ins[i] + POS] > low:
            low = r[8 * ins[i] + POS]
    high = r[8 * (p[NODES] - 1) + POS]
    if r[8 * node + NEXT] >= 0:
        high = r[8 * r[8 * node + NEXT] + POS]
    for i in range(v[8 * node + USERS], v[8 * node + 8 + USERS]):
        if r[8 * use[i] + POS] < high:
            high = r[8 * use[i] + POS]
    # From `low + 1` to `high` are the places of the run that will come after it.
    reach = ORDER_REACH << below(p, ORDER_REACHES)
    if slot - reach > low:
        low = slot - reach
    if slot + reach < high:
        high = slot + reach
    target = run_at_or_after(s, low + 1 + below(p, high - low))
    following = run_at_or_after(s, slot + 1)
    if target in (node, following):
        return False
    at = 3 * p[UNDO]
    undo[at] = 2
    undo[at + 1] = node
    undo[at + 2] = following
    p[UNDO] += 1
    shift(p, r, v, ins, use, s, t, dirty, todo, node, target)
    return True


def over_budget(p: Ints, t: Ints) -> int:
    """Bytes by which the peak exceeds the budget."""
    over = t[5] - p[BUDGET]
    return over if over > 0 else 0


def burden(p: Ints, t: Ints) -> float:
    """Bytes over the budget, less the fewer runs are that high: a way down from plateaus."""
    over = t[5] - p[BUDGET]
    if over <= 0:
        return 0.0
    return over * (0.5 + 0.5 * t[6] / p[LENGTH])


def change(
    p: Ints, r: Ints, v: Ints, ins: Ints, use: Ints, s: Ints, t: Ints, reps: Ints, free: Ints,
    dirty: Ints, undo: Ints, todo: Ints, limit: float,
) -> bool:  # fmt: skip
    """Makes one random change; False if it came to nothing or costs more than `limit`."""
    kind = below(p, KINDS)
    p[LONGEST] = 2 << below(p, LENGTHS)
    if p[REORDER] > 0 and below(p, 2) == 0:
        return reorder(p, r, v, ins, use, s, t, dirty, undo, todo)
    over = t[5] > p[BUDGET]
    count = p[REPS]
    if over and kind < DROP:
        # Too much memory: drop something across the peak.
        if not pick_across(p, r, v, ins, use, s, todo, peak_slot(p, t)):
            return False
        return recompute(
            p, r, v, ins, use, s, t, reps, free, dirty, undo, todo,
            todo[p[TODO]], todo[p[TODO] + 1], limit, RARE,
        )  # fmt: skip
    if count == 0 or kind >= ANYWHERE:
        # Anywhere: recompute a value just before one of its readers.
        if count > 0 and kind >= BESIDE:
            run = reps[below(p, count)]
        else:
            low = 0
            if p[TURN] > 0:
                low = r[8 * (p[TURN] - 1) + POS] + 1
            span = r[8 * (p[NODES] - 1) + POS] + 1 - low
            if span <= 0:
                return False
            run = run_at_or_after(s, low + below(p, span))
        node = r[8 * run + NODE]
        start = v[8 * node + INPUTS]
        inputs = v[8 * node + 8 + INPUTS] - start
        if inputs == 0:
            return False
        read = ins[start + below(p, inputs)]
        if v[8 * read + REPEATABLE] == 0:
            return False
        return recompute(
            p, r, v, ins, use, s, t, reps, free, dirty, undo, todo, read, run, limit, SOMETIMES
        )  # fmt: skip
    run = reps[below(p, count)]
    if kind < TAKE:
        take_unused(p, r, v, ins, use, s, t, reps, free, dirty, undo, todo, run)
        return True
    if kind < EXCHANGE:
        # Exchange: take one out, and drop other values while the peak is too high.
        take_unused(p, r, v, ins, use, s, t, reps, free, dirty, undo, todo, run)
        flush(p, r, v, s, t, dirty)
        for _ in range(EXCHANGES):
            if t[5] <= p[BUDGET]:
                return True
            if not pick_across(p, r, v, ins, use, s, todo, peak_slot(p, t)):
                return True
            if not recompute(
                p, r, v, ins, use, s, t, reps, free, dirty, undo, todo,
                todo[p[TODO]], todo[p[TODO] + 1], limit, RARE,
            ):  # fmt: skip
                return False
            flush(p, r, v, s, t, dirty)
        return True
    # Move a repetition: just before its first reader, or a few runs to either side.
    node = r[8 * run + NODE]
    slot = r[8 * run + POS]
    low = 0
    if p[TURN] > 0:
        low = r[8 * (p[TURN] - 1) + POS] + 1
    top = r[8 * (p[NODES] - 1) + POS]
    if kind < FIRST:
        target = first_use(r, v, use, run, slot)
        if target < 0:
            return False
    else:
        reach = REACH << below(p, REACHES)
        where = slot - reach + below(p, 2 * reach)
        if where < low:
            where = low
        if where > top:
            where = top
        target = run_at_or_after(s, where)
    if target == run or target == run_at_or_after(s, slot + 1):
        return False
    if r[8 * target + POS] <= r[8 * node + POS]:
        return False
    take(p, r, v, ins, use, s, t, reps, free, dirty, undo, run)
    if not recompute(
        p, r, v, ins, use, s, t, reps, free, dirty, undo, todo, node, target, limit, EVEN
    ):  # fmt: skip
        return False
    for i in range(v[8 * node + INPUTS], v[8 * node + 8 + INPUTS]):
        copy = copy_before(r, v, ins[i], slot)
        if copy >= p[NODES] and r[8 * copy + END] == copy:
            take_unused(p, r, v, ins, use, s, t, reps, free, dirty, undo, todo, copy)
    return True


def save_best(p: Ints, r: Ints, s: Ints, t: Ints, best: Ints) -> None:
    """Writes the sequence to `best`."""
    count = 0
    for i in range(p[SLOTS]):
        if s[i] >= 0:
            best[count] = r[8 * s[i] + NODE]
            count += 1
    p[BEST_LENGTH] = count
    p[BEST_OVER] = over_budget(p, t)
    p[BEST_COST] = p[COST]
    p[PENDING] = 0
    p[PATIENCE] = p[SLOTS] >> 5


def room(p: Ints) -> bool:
    """Whether a proposal fits into the arrays."""
    return p[FREE] > 2 * EDITS and (p[LENGTH] + 2 * EDITS) * 64 < p[SLOTS] * 22


def run(
    p: Ints, f: Reals, r: Ints, v: Ints, ins: Ints, use: Ints, s: Ints, t: Ints, reps: Ints, free: Ints,
    dirty: Ints, undo: Ints, todo: Ints, best: Ints, table: Reals, proposals: int,
) -> int:  # fmt: skip
    """Makes up to `proposals` proposals; returns how many, fewer if the arrays are full."""
    done = 0
    bits = 32 - TABLE_BITS
    while done < proposals:
        if not room(p):
            break
        done += 1
        p[DONE] += 1
        over = over_budget(p, t)
        cost = p[COST]
        energy = cost + f[PRICE] * burden(p, t)
        limit = energy + f[TEMPERATURE] * table[draw(p) >> bits]
        good = change(p, r, v, ins, use, s, t, reps, free, dirty, undo, todo, limit)
        flush(p, r, v, s, t, dirty)
        if p[PATIENCE] > 0:
            p[PATIENCE] -= 1
        if good:
            new_over = over_budget(p, t)
            good = p[COST] + f[PRICE] * burden(p, t) <= limit
            # Within the budget every improvement counts, above it only a marked one.
            if new_over == 0:
                better = p[BEST_OVER] > 0 or p[COST] < p[BEST_COST]
            else:
                better = good and MARKED * new_over < (MARKED - 1) * p[BEST_OVER]
            if better:
                p[BEST_OVER] = new_over
                p[BEST_COST] = p[COST]
                p[PENDING] = 1
                good = True
            elif good and p[PENDING] > 0:
                worse = new_over > over or p[COST] > cost
                if worse:
                    good = False  # the best state is not left before it is written down
                    if p[PATIENCE] == 0:
                        p[PENDING] = 2
        if good:
            p[UNDO] = 0
            p[ACCEPTED] += 1
        elif p[UNDO] > 0:
            undo_all(p, r, v, ins, use, s, t, reps, free, dirty, undo, todo)
        if p[PENDING] == 2:
            save_best(p, r, s, t, best)
        if t[5] <= p[BUDGET]:
            p[FEASIBLE] += 1
        if p[DONE] % PERIOD == 0:
            if 2 * p[FEASIBLE] > PERIOD:
                f[PRICE] /= f[PRICE_STEP]
            elif p[BEST_OVER] > 0:
                f[PRICE] *= f[PRICE_URGE]  # no sequence within the budget is known
            else:
                f[PRICE] *= f[PRICE_STEP]
            if f[PRICE] < f[PRICE_LOW]:
                f[PRICE] = f[PRICE_LOW]
            if f[PRICE] > f[PRICE_HIGH]:
                f[PRICE] = f[PRICE_HIGH]
            p[FEASIBLE] = 0
    over = over_budget(p, t)
    if over < p[BEST_OVER] or (over == p[BEST_OVER] and p[COST] < p[BEST_COST]):
        p[BEST_OVER] = over
        p[BEST_COST] = p[COST]
        p[PENDING] = 1
    if p[PENDING] > 0:
        save_best(p, r, s, t, best)
    return done


def load(
    p: Ints, r: Ints, v: Ints, ins: Ints, s: Ints, t: Ints, reps: Ints, free: Ints, handles: int,
    sequence: Ints, length: int,
) -> None:  # fmt: skip
    """Sets the state to a valid sequence."""
    nodes = p[NODES]
    slots = p[SLOTS]
    for i in range(slots):
        s[i] = -1
    p[REPS] = 0
    p[FREE] = 0
    p[COST] = 0
    p[DIRTY] = 0
    p[UNDO] = 0
    p[TODO] = 0
    p[LENGTH] = length
    for node in range(nodes):
        v[8 * node + LAST] = -1
    fresh = nodes
    for i in range(length):
        node = sequence[i]
        run = node
        old = v[8 * node + LAST]
        if old >= 0:
            run = fresh
            fresh += 1
            r[8 * run + INDEX] = p[REPS]
            reps[p[REPS]] = run
            p[REPS] += 1
            r[8 * old + NEXT] = run
        slot = ((2 * i + 1) * slots) // (2 * length)
        row = 8 * run
        s[slot] = run
        r[row + NODE] = node
        r[row + POS] = slot
        r[row + PREV] = old
        r[row + NEXT] = -1
        r[row + END] = run
        r[row + OUT] = 0
        v[8 * node + LAST] = run
        p[COST] += v[8 * node + OWN_COST]
        for j in range(v[8 * node + INPUTS], v[8 * node + 8 + INPUTS]):
            r[8 * v[8 * ins[j] + LAST] + END] = run
    for run in range(fresh):
        r[8 * r[8 * run + END] + OUT] += v[8 * r[8 * run + NODE] + SIZE]
    for run in range(handles - 1, fresh - 1, -1):
        free[p[FREE]] = run
        p[FREE] += 1
    for slot in range(slots):
        set_leaf(r, v, s, t, slots, slot)
    for i in range(slots - 1, 0, -1):
        pull(t, i)


FUNCTIONS = (
    draw, below, set_leaf, pull, mark, flush, peak_slot, range_max, spread, slot_before,
    run_at_or_after, copy_before, last_use, first_use, move_end, insert, delete, shift, add, take, undo_all,
    take_unused, recompute, pick_across, reorder, over_budget, burden, change, save_best, room, run, load,
)  # fmt: skip
