"""Plans what one step of a program costs, and chooses among several programs for it.

``plan`` reads the costs off a final program.  The choices stand above the pass pipeline: they run it with other options
and compare what comes out.  ``gradient_order`` chooses among orders of backward, ``gathers`` what stays gathered within
a budget, ``recomputation`` what backward computes again, ``stage`` the ZeRO stage; ``variants`` makes the programs.
"""

from graphzero.plan.budget import Budget
from graphzero.plan.plan import CATEGORIES, Collective, MemoryPlan, Plan, mega, memory_of, plan_of
from graphzero.plan.stage import STAGES, choose
from graphzero.plan.variants import Candidate

__all__ = [
    "CATEGORIES", "STAGES", "Budget", "Candidate", "Collective", "MemoryPlan", "Plan", "choose", "mega", "memory_of",
    "plan_of",
]  # fmt: skip
