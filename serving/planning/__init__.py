"""A model on a slice: how it is laid out, or why it can't be. Pure: imports neither Ray nor vLLM."""

from serving.planning.plan import Plan, plan
from serving.planning.shapes import ModelShape

__all__ = ["ModelShape", "Plan", "plan"]
