"""Plans what one step of a program costs, and chooses among several programs for it.

``program_costs`` reads the costs off a final program, ``plan`` says what a plan is.  The choices are above the pass
pipeline: they run it with other options and compare what comes out.  ``gradient_order`` chooses among orders of
backward, ``memory_fit`` what stays gathered and what backward computes again within limits, ``stage`` the ZeRO stage;
``variants`` makes the programs.
"""

from graphzero.plan.budget import Budget
from graphzero.plan.plan import CATEGORIES, Collective, MemoryPlan, Plan, mega
from graphzero.plan.plan_extension import PlanExtension
from graphzero.plan.program_costs import memory_of, plan_of
from graphzero.plan.stage import STAGES, choose
from graphzero.plan.variants import Candidate

__all__ = [
    "CATEGORIES", "STAGES", "Budget", "Candidate", "Collective", "MemoryPlan", "Plan", "PlanExtension", "choose",
    "mega", "memory_of", "plan_of",
]  # fmt: skip
