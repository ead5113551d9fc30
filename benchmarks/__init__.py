"""Benchmarks: what the compiler says (`compiled`), planning time (`planning`), step time (`gpu`).

They hold predictions against the compiler, so budgets are met as predicted unless a benchmark says otherwise.
"""

import os

os.environ.setdefault("REMAT_CONFIRM", "off")
