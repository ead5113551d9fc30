"""The numbers that decide how planning within a budget searches, each with what it is or how much it can cost.

None of them decides whether a plan is right or fits: the prediction of every plan is held to the budget. They
decide how long is searched, and how much may be given away when two plans are taken for alike."""

from __future__ import annotations

MARGIN = 0.03
"""Share of a budget that plans leave for the prediction's error, if there is a plan that does.

Measured: predictions for 68 programs, compiled for an H200, are off by a median of 1.6 % with jax 0.10.2 and 2.5
% with 0.12 (`python -m benchmarks.memory_model`). It costs at most 3 % of the memory; a plan that needs it is
taken."""

ALIKE_PEAK = 0.001
"""A plan whose peak is less than this share below that of no plan saves nothing: a few numbers. Bound: 0.1 % of the
memory. Measured: with 3 % a recommender's plan is given up that is predicted to save 1.7 % and saves more."""

SLACK = 0.02
"""A plan that leaves more than this share of the budget is asked for again with more. Bound: 2 % of the
memory."""

ATTEMPTS = 5
"""Requests to a policy until its prediction is close to the budget. Bound: planning time."""

STEP = 1.1
"""A request that a policy cannot meet is raised by this factor, or to the smallest peak that it names. Bound: 10
% of a request that nobody named; the next correction takes back what is too much."""

ROUNDS = 6
"""Ways to run the loops, and budgets for what is outside, that a session tries of each kind. Bound: planning
time; a round traces and plans once."""

HOPE = 1.05
"""With a setting in hand, loops are tried that the estimate puts up to 5 % above the budget. Bound: rounds in
vain; what does not fit when it is predicted is not taken."""

ALIKE_COST = 0.001
"""Choices of rewrites whose costs differ by less are told apart by predicted traffic. Bound: 0.1 % of the
cost."""

WORTHWHILE = 0.97
"""A way to run a loop that takes more memory has to be at least 3 % faster than the one before. Bound: 3 % of
what the loop costs; it keeps menus short, in whose product choosing for several loops is exponential."""

NOTICED = 0.02
"""A gain below this share of what an iteration takes is none. Bound: 2 % of an iteration, less than the error of
roofline estimates."""

ALIKE_RATE = 0.01
"""Values that save bytes at rates within 1 % are equally good to drop; the smallest goes first. Bound: 1 % of the
price of one value."""

DOMINATED = 0.9
"""An option of a loop's body is dropped unplanned if another keeps less than this share of its bytes and is no
slower. It is worse in both; the tenth is for what an iteration works in, which is known only once it is
planned."""

FEW_COMBINATIONS = 4096
"""Combinations of ways to run several loops that are enumerated; with more, knapsacks are solved. Bound:
milliseconds."""

FEW_LIMITS = 8
"""Limits on what a loop may work in for each of which a knapsack is solved. Exact with up to eight distinct ones,
else spread evenly over them, and loops may get less memory than fits."""

RAISES = 8
"""Requests that look for any budget that can be met, each at least an eighth larger. Bound: planning time."""

HALVINGS = 5
"""Halvings between what can be met and what cannot. Bound: planning time; each is one planning."""

CLOSE = 1.05
"""The search for the smallest peak ends within 5 % of what cannot be met. Bound: 5 % of the smallest peak."""
