"""Peak splitting: walk to the highest over-budget step and move, delay or recompute what lies idle across it.

At the step that holds the most, every buffer that is allocated but neither read nor written is a candidate.
Emitting its producer once more just before the next read frees it in between; if the original then has no
reader left, the emission *is* a postponement and costs nothing. Running its remaining readers early is the
third way. Candidates are ranked by an estimate, the best are priced by the exact simulator, and the one that
removes the most excess per unit of cost is taken, until the order fits or nothing helps.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from onnx_remat.schedule import Floats
from onnx_remat.selectors.kernels import (
    NEVER,
    Around,
    Flat,
    cost_of,
    excess_of,
    insert,
    plan,
    ranked,
    reads_around,
    score,
    strip,
    valid,
)

KEEP_IF_IT_FITS, RECOMPUTE_DEAD, HOIST = 0, 1, 2  # what a candidate does; see `recompute_chain` and `hoist`
_CHAIN = 200  # ops one candidate may emit again
_LOOKUP = 1  # steps simulated in the time one op joins a chain
_HOISTED = 32  # ops one candidate may run early
_REFUSALS = 12  # peaks given up before the walk ends
NO_LUCK = np.ones(1)
_LUCKS = 1021  # factors drawn at a time, a prime
_APART = 8  # steps on either side that are given up with a peak


def luck(rng: np.random.Generator, spread: float) -> Floats:
    """Log-normal factors that make a greedy walk a random one."""
    return np.exp(spread * rng.standard_normal(_LUCKS))


@njit(cache=True)
def negligible(f: Flat):  # type: ignore[no-untyped-def]
    """A cost far below one op's, to rank what costs nothing."""
    total = 0.0
    for cost in f.cost:
        total += cost
    return total / len(f.cost) * 1e-3 + 1e-30


@njit(cache=True)
def range_max_table(values):  # type: ignore[no-untyped-def]
    """Sparse table: ``table[j, i]`` is the maximum of ``values[i : i + 2**j]``."""
    n, levels = len(values), 1
    while (1 << levels) <= n:
        levels += 1
    table = np.empty((levels, n), np.int64)
    for i in range(n):
        table[0, i] = values[i]
    for j in range(1, levels):
        half = 1 << (j - 1)
        for i in range(n - 2 * half + 1):
            table[j, i] = max(table[j - 1, i], table[j - 1, i + half])
    return table


@njit(cache=True)
def range_max(table, low, high):  # type: ignore[no-untyped-def]
    """Maximum over ``low <= i < high``; 0 where that is empty."""
    if low >= high:
        return np.int64(0)
    j = 0
    while (2 << j) <= high - low:
        j += 1
    return max(table[j, low], table[j, high - (1 << j)])


@njit(cache=True)
def idle_tenants(n_buf, buffer_of, around: Around, p):  # type: ignore[no-untyped-def]
    """Instances made before `p` and read after it, as one linked list per buffer.

    Returns
    -------
    head : int32 (n_buf,)
        First of each buffer's instances, -1 for none.
    link : int32 (n_inst,)
        The next one of the same buffer, -1 at the end.
    """
    head, link = np.full(n_buf, -1, np.int32), np.full(len(around.made), -1, np.int32)
    for i in range(len(around.made) - 1, -1, -1):
        b = buffer_of[i]
        if b >= 0 and around.made[i] < p and around.after[i] != NEVER:
            link[i] = head[b]
            head[b] = i
    return head, link


@njit(cache=True)
def recompute_chain(f, buffer_of, around, idle, table, b, p, limit, mode):  # type: ignore[no-untyped-def]
    """Ops to emit again so that buffer `b` is free between step `p` and each tenant's next read.

    A dead input of an emitted op is emitted too (`mode` RECOMPUTE_DEAD), or kept alive where that fits under
    `limit` at every step in between (KEEP_IF_IT_FITS).

    Returns
    -------
    at, ops : int32
        What to insert where, in order; empty if it cannot be done.
    """
    at, ops = np.empty(_CHAIN, np.int32), np.empty(_CHAIN, np.int32)
    n_tenants, n = 0, 0
    i = idle[0][b]
    while i >= 0:
        n_tenants += 1
        i = idle[1][i]
    tenants, when = np.empty(n_tenants, np.int32), np.empty(n_tenants, np.int32)
    i = idle[0][b]
    for j in range(n_tenants):
        tenants[j], when[j] = i, around.after[i]
        i = idle[1][i]
    fresh = np.full(len(around.final), -1, np.int32)  # step before which an op is emitted by this candidate
    for j in ranked(when):
        q = around.after[tenants[j]]
        maker = f.made_by[around.value[tenants[j]]]
        if fresh[maker] >= 0:
            continue
        if n == _CHAIN:
            return at[:0], ops[:0]
        n0 = n
        at[n], ops[n], fresh[maker] = q, maker, q
        n += 1
        todo = n0
        while todo < n:
            op = ops[todo]
            todo += 1
            for k in range(f.in_ptr[op], f.in_ptr[op + 1]):
                w = f.in_values[k]
                source = f.made_by[w]
                if source < 0:
                    continue
                t = around.final[source]
                while t >= q:
                    t = around.previous[t]
                if fresh[source] >= 0 and (fresh[source] > t or fresh[source] == q):
                    continue
                inst = around.head[t]
                while around.value[inst] != w:
                    inst += 1
                again = buffer_of[inst] == b
                if not again and around.last[inst] < q and buffer_of[inst] >= 0:
                    room = limit - f.nbytes[w]
                    again = (
                        mode == RECOMPUTE_DEAD or range_max(table, max(around.last[inst], t) + 1, q) > room
                    )
                    again = again and f.recomputable[source]
                if again:
                    if n == _CHAIN:
                        return at[:0], ops[:0]
                    at[n], ops[n], fresh[source] = q, source, q
                    n += 1
        chain = ops[n0:n].copy()
        for j_sorted, j_chain in enumerate(ranked(chain)):  # op numbers ascend topologically
            ops[n0 + j_sorted] = chain[j_chain]
    return at[:n], ops[:n]


@njit(cache=True)
def chain_cost(f, around, p, ops):  # type: ignore[no-untyped-def]
    """Cost of emitting `ops` again, free where the original has not been read by step `p` and may move."""
    total = 0.0
    for op in ops:
        t = around.final[op]
        while around.previous[t] >= 0 and t > p:
            t = around.previous[t]
        free = f.movable[op] and t <= p
        for i in range(around.head[t], around.head[t] + f.out_ptr[op + 1] - f.out_ptr[op]):
            free = free and around.before[i] < 0
        if not free:
            total += f.cost[op]
    return total


@njit(cache=True)
def hoist(order, f, buffer_of, around, b, p):  # type: ignore[no-untyped-def]
    """`order` with the later readers of buffer `b`, and what they need, before `p`; empty if impossible."""
    end = -1
    for i in range(len(around.made)):
        if buffer_of[i] == b and around.made[i] < p:
            end = max(end, around.last[i])
    if end <= p:
        return order[:0]
    wanted = np.zeros(len(f.nbytes), np.bool_)
    moved = np.zeros(end + 1, np.bool_)
    tenant = np.zeros(len(f.nbytes), np.bool_)
    for i in range(len(around.made)):
        if buffer_of[i] == b and around.made[i] < p and around.after[i] != NEVER:
            tenant[around.value[i]] = True
    count = 0
    for t in range(end, p - 1, -1):
        op = order[t]
        for k in range(f.out_ptr[op], f.out_ptr[op + 1]):
            if wanted[f.out_values[k]]:
                moved[t] = True
        if t > p:
            for k in range(f.in_ptr[op], f.in_ptr[op + 1]):
                moved[t] = moved[t] or tenant[f.in_values[k]]
        if moved[t]:
            count += 1
            if count > _HOISTED or not f.movable[op]:
                return order[:0]
            for k in range(f.out_ptr[op], f.out_ptr[op + 1]):
                wanted[f.out_values[k]] = False
            for k in range(f.in_ptr[op], f.in_ptr[op + 1]):
                wanted[f.in_values[k]] = True
    result = order.copy()
    i = p
    for t in range(p, end + 1):
        if moved[t]:
            result[i] = order[t]
            i += 1
    for t in range(p, end + 1):
        if not moved[t]:
            result[i] = order[t]
            i += 1
    return result


@njit(cache=True)
def candidates(order, f, budget, p, evict, planned, around, idle, table, jitter):  # type: ignore[no-untyped-def]
    """Candidates at step `p`: their numbers with the best first, each one's buffer and mode.

    The fourth result is what the ranking itself took, in evaluations.
    """
    step_bytes, size, buffer_of = planned[0], planned[3], planned[5]
    n_buf = len(size)
    low, high = np.full(n_buf, -1, np.int32), np.full(n_buf, NEVER, np.int32)
    busy = np.zeros(n_buf, np.bool_)
    stays = np.zeros(n_buf, np.bool_)  # its tenant must not be emitted twice and has been read
    for i in range(len(around.made)):
        b = buffer_of[i]
        if b < 0 or around.made[i] > p:
            continue
        busy[b] = busy[b] or around.made[i] == p or around.before[i] == p
        low[b] = max(low[b], max(around.made[i], around.before[i]))
        if around.after[i] != NEVER:
            high[b] = min(high[b], around.after[i])
            if f.is_output[around.value[i]]:
                stays[b] = True
            if not f.recomputable[f.made_by[around.value[i]]] and (
                around.before[i] >= 0 or not f.movable[f.made_by[around.value[i]]]
            ):
                stays[b] = True
    small = negligible(f)
    reorders = f.movable.any()
    scores, which, modes = np.empty(3 * n_buf), np.empty(3 * n_buf, np.int32), np.empty(3 * n_buf, np.int32)
    n, work = 0, 0
    for b in range(n_buf):
        if busy[b] or high[b] == NEVER or size[b] == 0:
            continue
        gain = 0.0
        for t in range(low[b] + 1, high[b]):
            gain += min(max(step_bytes[t] - budget, 0), size[b])
        work += high[b] - low[b]
        if gain <= 0:
            continue
        chance = jitter[(31 * b + len(order)) % len(jitter)]
        if reorders:
            scores[n], which[n], modes[n] = -gain / small * chance, b, HOIST
            n += 1
        if stays[b]:
            continue
        shorter = -1
        for mode in range(2):
            ops = recompute_chain(f, buffer_of, around, idle, table, b, p, budget, mode)[1]
            work += _LOOKUP * (len(ops) if len(ops) else _CHAIN)
            if len(ops) == 0 or len(ops) == shorter:
                continue
            shorter = len(ops)
            extra = chain_cost(f, around, p, ops)
            if extra > 0 and not evict:
                continue
            scores[n], which[n], modes[n] = -gain / (extra + small) * chance, b, mode
            n += 1
    return ranked(scores[:n]), which, modes, work // len(order)


@njit(cache=True)
def relieve(order, f: Flat, budget, evict, jitter, evals, top):  # type: ignore[no-untyped-def]
    """Split peaks until `order` fits under `budget` (residents excluded) or `evals` simulations are spent.

    Parameters
    ----------
    evict : bool
        False forbids whatever costs compute.
    jitter : float64 (n,)
        Factors on the candidates' ranks, see `luck`; `NO_LUCK` is greedy.
    top : int
        Candidates priced exactly per peak and kind.

    Returns
    -------
    order, excess, evals spent
    """
    cost = cost_of(order, f)
    small = negligible(f)
    spent, refusals = 0, 0
    banned = np.zeros(len(order), np.bool_)
    while True:
        planned = plan(order, f)
        spent += 1
        step_bytes, buffer_of = planned[0], planned[5]
        excess = excess_of(step_bytes, budget)
        if excess == 0 or spent >= evals or refusals == _REFUSALS:
            break
        p = -1
        for t in range(len(order)):
            if not banned[t] and step_bytes[t] > budget and (p < 0 or step_bytes[t] > step_bytes[p]):
                p = t
        if p < 0:
            break
        around = reads_around(order, f, p)
        idle = idle_tenants(len(planned[3]), buffer_of, around, p)
        table = range_max_table(step_bytes)
        rank, which, modes, used = candidates(
            order, f, budget, p, evict, planned, around, idle, table, jitter
        )
        spent += used
        best_rate, best_order, best_cost = 0.0, order, cost
        tried = np.zeros(2, np.int64)
        for i in rank:
            kind = 0 if modes[i] == HOIST else 1
            if tried[kind] >= top:
                continue
            if modes[i] == HOIST:
                new = hoist(order, f, buffer_of, around, which[i], p)
                if len(new) == 0:
                    continue
            else:
                at, ops = recompute_chain(f, buffer_of, around, idle, table, which[i], p, budget, modes[i])
                grown = insert(order, at, ops)
                new = strip(grown, f, np.zeros(len(grown), np.bool_))
            if not valid(new, f):
                continue
            tried[kind] += 1
            spent += 1
            new_excess = excess_of(plan(new, f)[0], budget)
            new_cost = cost_of(new, f)
            if new_excess < excess and (evict or new_cost <= cost * (1 + 1e-12)):
                rate = (excess - new_excess) / (max(new_cost - cost, 0.0) + small)
                if rate > best_rate:
                    best_rate, best_order, best_cost = rate, new, new_cost
        if best_rate > 0:
            order, cost = best_order, best_cost
            banned = np.zeros(len(order), np.bool_)
            refusals = 0
        else:
            refusals += 1
            banned[max(0, p - _APART) : p + _APART + 1] = True
    return order, excess, spent


@njit(cache=True)
def prune(order, f: Flat, budget, evals):  # type: ignore[no-untyped-def]
    """Leave out recomputes, dearest first, for as long as the excess over `budget` does not grow.

    Returns
    -------
    order, evals spent
    """
    count = np.zeros(len(f.in_ptr) - 1, np.int32)
    for op in order:
        count[op] += 1
    prices = np.zeros(len(order))
    for t in range(len(order)):
        if count[order[t]] > 1:
            prices[t] = -f.cost[order[t]]
    excess = score(order, f, budget)[0]
    spent = 1
    drop = np.zeros(len(order), np.bool_)
    seen = np.zeros(len(count), np.bool_)
    first = np.zeros(len(order), np.bool_)
    for t in range(len(order)):
        first[t] = not seen[order[t]]
        seen[order[t]] = True
    best = order
    for t in ranked(prices):
        op = order[t]
        if count[op] < 2 or spent >= evals or (first[t] and not f.movable[op]):
            continue
        drop[t] = True
        new = strip(order, f, drop)
        ok = len(new) < len(best) and valid(new, f)
        if ok:
            spent += 1
            now = score(new, f, budget)[0]
            ok = now <= excess
        if ok:
            best, excess = new, now
        else:
            drop[t] = False
    return best, spent
