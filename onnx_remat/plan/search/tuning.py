"""Tunables of the search, in one place, each with its provenance.

*Measured*: a figure of some machine or graph. *By reasoning*: derived from the purpose. *By hand*: set while the search
was written, from results on published graphs and samples; no sweep is on record, so better values may exist
(``scripts/bench_planner.py`` prints costs against published ones). None can make a plan wrong. All are compiled into
kernels or read at import.
"""

from __future__ import annotations

# --- amount of work (effort, anneal, intervals) ---

WORK_PER_SECOND = 290_000_000
"""Units of work per second, one per profile place changed: measured on a slow core, so that limits tend to be kept."""
WORK_PER_CANDIDATE = 3000
"""Work that counts as one in `Request.work`: by reasoning, one move with its changes of the profile."""
SETUP_SECONDS = 2.5e-4
"""Seconds per op for seeds and bookkeeping: measured, roughly."""
LEAST_SHARE = 0.4
"""Share of the effort that always remains for the search: by reasoning."""
WORK_OF_MOVE = 800
"""Work of a move apart from the profile: measured, so that a unit takes equally long on large and small graphs."""
WORK_OF_CHANGE = 220
"""Work of one change of the profile, apart from the places changed: measured together with WORK_OF_MOVE."""
FREE_TOUCHES, WORK_OF_TOUCH = 256, 4
"""Touches of a value that a search for the last one before a place passes as part of a move, and work of each further
one: by reasoning, few values have so many readers; and measured, roughly.
"""
PLACES_PER_STEP = 4
"""Places per step of the annealed order: by reasoning; with fewer, events are shifted more often; with more, ranges are
longer."""

# --- annealing (anneal) ---

ADD, SWAP, REMOVE, REORDER, HOIST = 0.25, 0.25, 0.2, 0.8, 0.1
"""How often each kind of move is tried: by hand."""
HOT_READ = 0.7
"""How often `add` looks for an interval across a step above the budget: by hand."""
PERIOD = 500
"""Moves between two updates of the multiplier: by reasoning, enough for a meaningful share of feasible moves."""
PRICE_STEP = 1.08
"""Factor of one update of the multiplier: by hand."""
FEASIBLE_SHARE = 0.35
"""Share of the moves that should end within the budget: by hand; the cheapest plans just fit."""
FIRST_PRICE = 0.1
"""Initial price of an average op's output bytes above the budget for one step, in average ops' costs: by reasoning."""

# --- single moves (neighbours) ---

CHAIN = 128
"""Events that one removal may take out, including recomputes that become unused, or that a whole chain may add: about
two layers of a transformer. Measured with 20 seeds, a GPT-2 at 40 % of a loop's memory: +23 to 37 % compute; with at
most 64, a quarter of the plans end at over 80 %, and with 40, before whole chains, all at over 76 %."""
EARLY = 0.3
"""How often a recompute is inserted after the last use of an input instead of just before its reader: by hand."""
LONGEST_ADDED = 16
"""Recomputes that one move may add, unless it adds a whole chain: by hand."""
WHOLE = 0.97
"""Probability of recomputing an input above which all are, so that one move in 70 adds a whole chain: measured, from
0.8 to 0.99; more often or less often, fewer runs find the best plans."""
HOISTED = 16
"""Events that one move may run earlier: by reasoning, as LONGEST_ADDED."""
LOG = max(3 * CHAIN, HOISTED * (CHAIN + 1))
"""Capacity of a move's log: `add` starts no removal after CHAIN entries, and a swap adds one more removal; `hoist`
inserts HOISTED events and removes as many."""
NEAR = 3
"""Places: an input whose last use is at most this far away is kept, not recomputed: by hand."""
TRIES = 12
"""Intervals sampled to find one across a chosen step: by reasoning."""

# --- initial orders (orders, keep_all) ---

FEW_DESCENDANTS = 8
"""An op with at most this many descendants belongs to a leaf branch, such as a weight's update: by hand."""
ORDERS_IMPROVED = 3
"""Orders without recompute on which local improvement is tried: by hand."""
COARSE, FINE = 0.04, 0.004
"""Fraction by which one round of improvement aims to lower the peak, at first and at last: by hand."""
ROUND_SHARE = 0.05
"""Share of the work of one round: by hand."""
REORDER_HEAT = (0.5, 0.05)
"""Temperatures of a round at its start and end, in average ops' costs: by hand."""

# --- annealing runs of one search (search, plans) ---

LANES = 2
"""Annealing runs at the same time: fixed, so that plans do not depend on the machine."""
MOST_TRIES, TRY_SHARE = 8, 0.4
"""Runs from the starting points, and their share of the work: measured, see `CONTINUE_SHARE`."""
WORK_PER_OP = 150_000
"""Work per op that makes a run worthwhile: with less work there are fewer runs; by hand."""
TRIAL_HEATS = ((0.1, 0.01), (0.3, 0.02), (1.0, 0.02))
"""Temperatures of these runs, in turn: by hand."""
ALMOST = 1.01
"""Multiple of the budget: the cheapest plan up to it is a starting point too, as annealing soon makes it fit; by
hand."""
LAYERS_WORK_PER_OP = 25_000
"""Minimum work, per op of the whole problem, for a search with few layers of a stack of equal ones: by hand."""
PLANS_CONTINUED, CONTINUE_SHARE = 2, 0.4
"""Number of best plans that are annealed further, and the share of the work for it: measured with six seeds on eleven
budgets: 4 plans with a share of 0.25, and tries of 0.6, cost more on seven and less on one."""
AIMS = (1.0, 0.97)
"""Multiples of the budget, if no plan fits or only a dear one: targets of one long run per lane, from the lowest plan
and from the lowest that is not dear; by hand."""
DEAR = 1.5
"""Multiple of the cost without recompute above which a plan is too expensive to continue from; the lowest of the plans
above the budget is annealed instead. By hand, as recursive plans run whole blocks again."""
CONTINUE_HEAT = (0.15, 0.005)
"""Temperatures of these runs: by hand; lower than those of the first runs, which found the plans."""
LAST_HEATS = ((0.05, 0.002), (0.1, 0.002))
"""Temperatures of the last runs, one per lane: by hand."""
LAST_ROUNDS = 4
"""Additional rounds, each with the whole allowance, in which a plan above the budget may get below it: by hand."""
PATIENCE = 3
"""Consecutive rounds without gain, each with twice the work of the one before, that end a search with `use_time`."""
TIGHTER_TARGETS = 6
"""Times that the target is lowered because shared buffers exceed the budget: by reasoning."""
RECURSION_SECONDS_PER_OP = 1e-3
"""Seconds per op that must be left for recursive plans: measured, four times their time on 9,900 ops."""
LARGE_OPS = 20_000
"""Number of ops above which seeds by maximum flow are skipped: by reasoning, for the seconds that a flow takes."""
