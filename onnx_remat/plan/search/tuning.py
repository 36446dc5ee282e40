"""Tunables of the search, in one place, each with what it was set by.

*Measured*: a figure of some machine or graph. *By reckoning*: follows from what it is for. *By hand*: set while the
search was written, by what it did to published graphs and samples; no sweep is on record, so that there may be better
ones (``scripts/bench_planner.py`` prints costs against published ones). None can make a plan wrong. All are compiled
into kernels or read at import.
"""

from __future__ import annotations

# --- how much work there is (effort, anneal, intervals) ---

WORK_PER_SECOND = 290_000_000
"""Places of a profile changed, and their like, in a second: measured on a slow core, so that a limit is rather kept."""
WORK_PER_CANDIDATE = 3000
"""Work that `Request.work` counts as one: by reckoning, a move with its changes of the profile."""
SETUP_SECONDS = 2.5e-4
"""Seconds per op that seeds and bookkeeping take: measured, roughly."""
LEAST_SHARE = 0.4
"""Share of the time limit that is left to the search in any case: by reckoning."""
WORK_OF_MOVE = 800
"""Work of a move beside that on the profile: measured, so that work is even over large graphs and small."""
WORK_OF_CHANGE = 220
"""Work of changing the profile anywhere, beside the places changed: measured with WORK_OF_MOVE."""
PLACES_PER_STEP = 4
"""Places per step of the order that is annealed: by reckoning; fewer make events move aside, more make ranges long."""

# --- the annealing (anneal) ---

ADD, SWAP, REMOVE, REORDER, HOIST = 0.25, 0.25, 0.2, 0.8, 0.1
"""How often each kind of move is tried: by hand."""
HOT_READ = 0.7
"""How often an interval is looked for that helps at once: by hand."""
PERIOD = 500
"""Moves between two looks at the multiplier: by reckoning, enough for a share of them to mean something."""
PRICE_STEP = 1.08
"""Factor by which the multiplier follows: by hand."""
FEASIBLE_SHARE = 0.35
"""Share of the moves that should end within the budget: by hand; the cheapest plans just fit."""
FIRST_PRICE = 0.1
"""Of one op's bytes for one step above the budget, in average ops' cost, to begin with: by reckoning."""

# --- single moves (moves) ---

CHAIN = 40
"""Events that one removal may take out, what nobody reads then included: by reckoning."""
EARLY = 0.3
"""How often a recompute goes where an input was last used, not just before its reader: by hand."""
LONGEST_ADDED = 16
"""Recomputes one move may add: by hand; few are long, as most long chains are turned down."""
HOISTED = 16
"""Events one move may run earlier: by reckoning, as LONGEST_ADDED."""
LOG = max(3 * CHAIN, HOISTED * (CHAIN + 1))
"""Room in the log of a move: `add` begins no removal behind CHAIN entries, and a swap adds one removal more; `hoist`
puts HOISTED events in and removes as many."""
NEAR = 3
"""An input that ended this few places before is held, not recomputed: by hand."""
TRIES = 12
"""Intervals looked at to find one across a chosen step: by reckoning."""

# --- the orders it starts from (orders, keep_all) ---

FEW_DESCENDANTS = 8
"""An op with at most this many belongs to a leaf branch, such as a weight's update; by hand."""
ORDERS_IMPROVED = 3
"""Orders without recompute that local improvement is tried on: by hand."""
COARSE, FINE = 0.04, 0.004
"""Fraction of the peak that one round of improvement aims to take off, at first and at last: by hand."""
ROUND_SHARE = 0.05
"""Share of the work that one round takes: by hand."""
REORDER_HEAT = (0.5, 0.05)
"""Temperatures of a round at its start and end, in average ops' costs: by hand."""

# --- the runs of one search (search, plans) ---

LANES = 2
"""Annealing runs that go on at the same time: a fixed figure, so that plans do not depend on the machine."""
MOST_TRIES, TRY_SHARE = 8, 0.6
"""Runs from the starting points, and the share of the work they take together: by hand."""
WORK_PER_OP = 150_000
"""Work per op that makes a run worth while: with less there are fewer runs; by hand."""
TRIAL_HEATS = ((0.1, 0.01), (0.3, 0.02), (1.0, 0.02))
"""Temperatures of the runs, in turn: by hand."""
ALMOST = 1.01
"""Of the budget: the cheapest plan up to this is a start too, as the annealing soon makes it fit: by hand."""
LAYERS_WORK_PER_OP = 25_000
"""Least work per op of a stack of equal layers that a plan for few of them is searched with: by hand."""
PLANS_CONTINUED, CONTINUE_SHARE = 4, 0.25
"""The best of them that are gone on from, and the share of the work they take together: by hand."""
AIMS = (1.0, 0.97)
"""Of the budget: what the lowest plan is annealed for, in one long run per lane, where none fits; by hand."""
DEAR = 1.5
"""Times the cost without recompute, above which a plan is no start: the lowest that is cheaper is annealed instead; by
hand, as recursive plans run whole blocks again."""
CONTINUE_HEAT = (0.15, 0.005)
"""Temperatures of these runs: by hand; below those of the first, which found the plans."""
LAST_HEATS = ((0.05, 0.002), (0.1, 0.002))
"""Temperatures of the last runs, one per lane: by hand."""
LAST_ROUNDS = 4
"""Rounds, each of the work that there was, in which a plan above the budget may get below it: by hand."""
FRUITLESS = 3
"""Rounds in a row, each of twice the work of the one before, that find nothing before the clock is left alone."""
TIGHTER_TARGETS = 6
"""Times the budget is made smaller where shared buffers exceed it: by reckoning."""
RECURSION_SECONDS_PER_OP = 1e-3
"""Seconds left without which recursive plans are left out: four times what they took on 9,900 ops, measured."""
LARGE_OPS = 20_000
"""Ops above which seeds that take a maximum flow are left out: by reckoning, for the seconds that one takes."""
