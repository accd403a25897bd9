"""The chip use of a simulated slice: the plan's speed over the tokens its engine has counted.

On TPU hosts Ray's agent reads it from the chips. Here it is computed, and its series say simulated="true".
"""

from serving.engine.slice_metrics import ChipUse
from serving.planning import Plan
from serving.state.records import SliceRecord


def chip_use(plan: Plan, before: SliceRecord, after: SliceRecord, seconds: float) -> ChipUse:
    """A chip's use between two records, which are `seconds` apart. All chips of a slice do the same."""
    hardware, fit = plan.slice.hardware, plan.fit
    devices = hardware.devices_per_chip
    used = fit.weight_bytes + after.kv_usage * fit.cache_bytes
    prefilled = max(
        0, after.prompt_tokens - before.prompt_tokens - (after.cached_tokens - before.cached_tokens)
    )
    written = max(0, after.output_tokens - before.output_tokens)
    busy = flops = read = 0.0
    if prefilled + written and seconds > 0:
        sequences = max(1, after.running, before.running)
        context = int(after.kv_usage * fit.cache_tokens / sequences)
        speed = plan.speed(sequences=sequences, context=context)
        busy = (written / speed.decode_tokens_per_s + prefilled / speed.prefill_tokens_per_s) / seconds
        active = sum(2 * group.active for group in fit.groups)
        flops = active * (prefilled + written) / seconds / plan.slice.chips / hardware.bf16_flops
        steps_a_second = (written / sequences + prefilled / plan.sizes.batched_tokens) / seconds
        read = steps_a_second * used * devices / hardware.hbm_bytes_per_s
    return ChipUse(
        tensorcore=100 * min(1.0, flops),
        bandwidth=100 * min(1.0, read),
        duty_cycle=100 * min(1.0, busy),
        hbm_used=devices * used,
        hbm_total=hardware.hbm_bytes,
    )
