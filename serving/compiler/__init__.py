"""Asks the TPU's own compiler about a plan, on a machine without a TPU.

libtpu's compiler needs a description of the chips, not the chips. A process of its own (`worker`) does three things:

1. It builds tpu-inference's runner for a plan on arrays that have a shape and no bytes (`abstract`).
2. It has the runner list the programs that an engine compiles at start (`engine`).
3. It has libtpu compile some of them.

`processes` starts and ends such processes, `records` says what they report, `report` sets it beside the plan.
"""
