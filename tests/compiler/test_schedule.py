"""What a compiled module's text says of cycles. `tests/compiler/test_real_compiler.py` has libtpu's own."""

import pytest

from serving.compiler.schedule import Schedule, schedule

pytestmark = pytest.mark.unit


def estimated(cycles: int) -> str:
    return f'metadata={{op_name="jit(f)/mul"}}, backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'


# As libtpu 0.0.43 writes it, without what is not read.
MODULE = f"""\
HloModule jit_step, is_scheduled=true, entry_computation_layout={{(bf16[32,1024]{{1,0:T(8,128)(2,1)}})->bf16[32,64]{{1,0}}}}

%add.2 (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[]{{:T(128)}} parameter(0)
  ROOT %add.3 = f32[] add(%x, %y)
}}

%inner (p: bf16[32,1024]) -> bf16[32,64] {{
  %p = bf16[32,1024]{{1,0:T(8,128)(2,1)}} parameter(0)
  ROOT %convolution.1 = bf16[32,64]{{1,0}} convolution(%p, %p), dim_labels=bf_io->bf
}}

%fused_product (p.1: bf16[32,1024]) -> bf16[32,64] {{
  %p.1 = bf16[32,1024]{{1,0:T(8,128)(2,1)}} parameter(0)
  ROOT %fusion.9 = bf16[32,64]{{1,0}} fusion(%p.1), kind=kOutput, calls=%inner
}}

%fused_slice (p.2: bf16[32,1024]) -> bf16[32,64] {{
  %p.2 = bf16[32,1024]{{1,0:T(8,128)(2,1)}} parameter(0)
  ROOT %slice.1 = bf16[32,64]{{1,0}} slice(%p.2), slice={{[0:32], [0:64]}}
}}

%fused_add (p.3: bf16[32,64]) -> bf16[32,64] {{
  %p.3 = bf16[32,64]{{1,0}} parameter(0)
  ROOT %add.4 = bf16[32,64]{{1,0}} add(%p.3, %p.3), {estimated(900_000)}
}}

%body (s: (s32[], bf16[32,64])) -> (s32[], bf16[32,64]) {{
  %s = (s32[]{{:T(128)}}, bf16[32,64]{{1,0}}) parameter(0)
  ROOT %fusion.8 = (s32[]{{:T(128)}}, bf16[32,64]{{1,0}}) fusion(%s), kind=kLoop, calls=%fused_add, {estimated(700_000)}
}}

ENTRY %main.9_spmd (param.1: bf16[32,1024]) -> bf16[32,64] {{
  %param.1 = bf16[32,1024]{{1,0:T(8,128)(2,1)}} parameter(0)
  %fusion.1 = bf16[32,64]{{1,0}} fusion(%param.1), kind=kOutput, calls=%fused_product, {estimated(50_000)}
  %slice_fusion = bf16[32,64]{{1,0}} fusion(%param.1), kind=kLoop, calls=%fused_slice, {estimated(3_000)}
  %copy.7 = bf16[32,64]{{0,1}} copy(%fusion.1), {estimated(2_000)}
  %add_fusion = (bf16[32,64]{{1,0}}, /*index=1*/s32[]{{:T(128)}}) fusion(%copy.7), kind=kLoop, calls=%fused_add, {estimated(400)}
  %convert.1 = f32[32]{{0:T(128)S(1)}} convert(%param.1), {estimated(100)}
  %copy-start.1 = (bf16[32,64]{{1,0}}, u32[]{{:S(2)}}) copy-start(%param.1)
  %copy-done.1 = bf16[32,64]{{1,0}} copy-done(%copy-start.1)
  %all-reduce.1 = bf16[32,64]{{1,0}} all-reduce(%fusion.1), channel_id=3, to_apply=%add.2
  %all-gather-start.1 = bf16[32,64]{{1,0}} all-gather-start(%fusion.1), channel_id=4
  %all-gather-done.1 = bf16[32,64]{{1,0}} all-gather-done(%all-gather-start.1)
  %RPAd-p_32-bq_1_1.1 = bf16[32,64]{{1,0}} custom-call(%fusion.1), custom_call_target="tpu_custom_call"
  %RPAd-p_32-bq_1_1.2 = bf16[32,64]{{1,0}} custom-call(%fusion.1), custom_call_target="tpu_custom_call"
  %custom-call.3 = s32[32]{{0}} custom-call(%param.1), custom_call_target="AssumeGatherIndicesInBound"
  %while.1 = (s32[]{{:T(128)}}, bf16[32,64]{{1,0}}) while(%tuple.1), condition=%add.2, body=%body
  ROOT %get-tuple-element.1 = bf16[32,64]{{1,0}} get-tuple-element(%while.1), index=1
}}
"""


def test_cycles_are_told_by_what_they_are_spent_on() -> None:
    found = schedule(MODULE)
    assert (found.product_cycles, found.move_cycles, found.other_cycles) == (50_000, 5_000, 500)


def test_what_has_no_estimate_is_counted_by_name_and_a_loop_s_inside_by_no_one() -> None:
    assert schedule(MODULE).unestimated == {
        "RPAd-p_32-bq_1_1": 2,
        "all-gather": 1,
        "all-reduce": 1,
        "copy-start": 1,
        "while": 1,
    }


def test_a_text_without_an_entry_has_nothing() -> None:
    assert schedule("HloModule nothing\n") == Schedule()
