"""Asks the TPU's own compiler about a plan, on a machine without a TPU.

libtpu's compiler needs a description of the chips, not the chips. A process of its own builds tpu-inference's runner for a
plan on arrays that have a shape and no bytes (`abstract`), lets the runner list the programs that it compiles at start
(`engine`), and has libtpu compile some of them (`worker`). `processes` starts and ends such processes, `records` says what
they report, `report` sets it beside the plan.
"""
