"""Plans a model on a slice before hardware is allocated: its layout and cost, or why it does not fit.

Planning reads the YAML and a `config.json` alone; it touches no cluster and imports neither Ray nor vLLM.
"""

from serving.planning.plan import Plan, plan
from serving.planning.shapes import ModelShape

__all__ = ["ModelShape", "Plan", "plan"]
