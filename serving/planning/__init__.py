"""A model on a slice, before any is allocated: how it is laid out, what it costs, or why it can't be.

Nothing here touches a cluster or imports Ray or vLLM; all it reads is the YAML and a `config.json`.
"""

from serving.planning.plan import Plan, plan, plan_pools
from serving.planning.shapes import ModelShape

__all__ = ["ModelShape", "Plan", "plan", "plan_pools"]
