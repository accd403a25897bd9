"""A plan as plain data: what `serving plan --json` prints and its table shows."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from serving.planning import speed
from serving.planning.alternatives import Candidate
from serving.planning.cache import separate_batches, sequence_bytes, whole_pages
from serving.planning.compiled import result_of
from serving.planning.fit import RESIDENT_BYTES
from serving.planning.plan import Plan
from serving.planning.prices import AS_OF, CURRENCY, chip_hour
from serving.planning.starts import StartTime
from serving.planning.weights import checkpoint_params

# Speed and price are predicted for this load, that of the published recipes, unless the model's length is shorter.
PROMPT_TOKENS = 1024
ANSWER_TOKENS = 1024

Prices = Mapping[str, Mapping[str, float]]


def summary(plan: Plan, prices: Prices) -> dict[str, Any]:
    """Every figure of a plan. Bytes are of one device, tokens and rates of one slice."""
    fit, slice_ = plan.fit, plan.slice
    predicted = _speed(plan)
    return {
        "model": plan.model.name,
        "checkpoint": plan.model.model,
        "fits": True,
        "slice": {
            "generation": slice_.generation,
            "topology": slice_.topology,
            "hosts": slice_.hosts,
            "machine_type": slice_.machine_type,
            "chips": slice_.chips,
            "devices": slice_.devices,
            "pod_type": slice_.pod_type,
        },
        "slices": {"min": plan.model.replicas.min, "max": plan.model.replicas.max},
        "mesh": {
            "tensor": plan.tensor,
            "pipeline": plan.pipeline,
            "data": plan.data,
            "expert": plan.layout.expert,
            "attention_data": plan.layout.attention_data,
            "attention_expert": plan.layout.attention_expert,
            "decode_context": plan.layout.decode_context,
            "prefill_context": plan.layout.prefill_context,
            "engine": plan.layout.mesh,
        },
        "reasons": list(plan.reasons),
        "parameters": {
            "checkpoint": checkpoint_params(plan.shape),
            "total": sum(group.params for group in fit.groups if not group.made),
            "active": sum(group.active for group in fit.groups),
            "groups": [
                {"name": group.name, "params": group.params, "format": group.format, "bytes": group.bytes}
                for group in fit.groups
            ],
        },
        "device_hbm": {
            "nameplate_bytes": slice_.hardware.hbm_bytes // slice_.hardware.devices_per_chip,
            "usable_bytes": fit.usable_bytes,
            "weight_bytes": fit.weight_bytes,
            "state_bytes": fit.state_bytes,
            "resident_bytes": RESIDENT_BYTES,
            "cache_bytes": fit.cache_bytes,
            "withheld_bytes": fit.withheld_bytes,
            "workspace_bytes": fit.workspace_bytes,
        },
        "cache_tokens": fit.cache_tokens,
        "max_model_len": fit.max_model_len,
        "longest_sequence": fit.longest,
        "sequences_at_max_model_len": fit.sequences,
        "most_sequences": plan.most_sequences,
        "speed": predicted,
        "start": _start(plan.start_time),
        "measured": _measured(plan),
        "compiled": asdict(result) if (result := result_of(plan.version)) else None,
        "prices": {
            "currency": CURRENCY,
            "as_of": AS_OF,
            "options": _costs(slice_.chips, chip_hour(slice_.generation, prices), predicted),
        },
    }


def candidate_summary(candidate: Candidate, prices: Prices) -> dict[str, Any]:
    """One row of `--what-fits`."""
    slice_ = candidate.slice
    return {
        "slice": f"{slice_.generation} {slice_.topology}",
        "hosts": slice_.hosts,
        "machine_type": slice_.machine_type,
        "tensor": candidate.layout.tensor,
        "pipeline": candidate.layout.pipeline,
        "cache_tokens": candidate.fit.cache_tokens,
        "sequences_at_max_model_len": candidate.fit.sequences,
        "per_hour": {
            option: round(price * slice_.chips, 2)
            for option, price in chip_hour(slice_.generation, prices).items()
        },
    }


def _start(start: StartTime) -> dict[str, Any]:
    """Seconds of a first start and of one whose programs are in the cache, and by phase from how many starts."""
    phases = {
        "weights": start.weights,
        "compile": start.compile,
        "compile_warm": start.compile_warm,
        "rest": start.rest,
    }
    return {
        "cold_s_range": [round(end) for end in start.range_s(warm=False)],
        "warm_s_range": [round(end) for end in start.range_s(warm=True)],
        "compilations_at_once": start.compilations,
        "phases": {
            name: {"s_range": [round(phase.low_s), round(phase.high_s)], "starts": phase.starts}
            if phase
            else None
            for name, phase in phases.items()
        },
    }


def _speed(plan: Plan) -> dict[str, Any]:
    length = plan.fit.max_model_len
    answer = min(ANSWER_TOKENS, max(length // 2, 1))
    prompt = min(PROMPT_TOKENS, max(length - answer, 1))
    sequences = sequences_at_once(plan, prompt, answer, plan.most_sequences)
    engine = speed.Engine(plan.shape, plan.sizes, plan.slice, plan.layout)
    predicted = plan.speed(sequences=sequences, context=prompt + answer // 2)
    off = speed.spread(engine)
    figures = {
        "prompt_tokens": prompt,
        "prefill_tokens_per_s": round(predicted.prefill_tokens_per_s),
        "prefill_tokens_per_s_range": _range(predicted.prefill_tokens_per_s, off),
    }
    if plan.sizes.pools:
        return figures
    rate = speed.rate(engine, prompt=prompt, answer=answer, sequences=sequences)
    return {
        **figures,
        "answer_tokens": answer,
        "sequences": sequences,
        "step_s": predicted.step_s,
        "decode_tokens_per_s": round(predicted.decode_tokens_per_s),
        "output_tokens_per_s": round(rate.tokens_per_s),
        "sampled_tokens_per_s": round(rate.sampled_tokens_per_s),
        "output_tokens_per_s_range": [round(rate.low), round(rate.high)],
    }


def _range(value: float, off: float) -> list[int]:
    return [round(value / off), round(value * off)]


def _measured(plan: Plan) -> list[dict[str, Any]]:
    if plan.sizes.pools:
        return []
    engine = speed.Engine(plan.shape, plan.sizes, plan.slice, plan.layout)
    rows = []
    for published in speed.measured_for(plan.shape, plan.sizes, plan.slice):
        for (prompt, answer, load), measured in published.rates.items():
            sequences = sequences_at_once(plan, prompt, answer, load)
            rate = speed.rate(engine, prompt=prompt, answer=answer, sequences=sequences)
            predicted = rate.sampled_tokens_per_s if published.sampled else rate.tokens_per_s
            rows.append(
                {
                    "prompt_tokens": prompt,
                    "answer_tokens": answer,
                    "sequences": load,
                    "output_tokens_per_s": measured,
                    "sampled": published.sampled,
                    "predicted_tokens_per_s": round(predicted),
                    "off_by": round(predicted / measured - 1, 2),
                    "source": published.source,
                }
            )
    return rows


def sequences_at_once(plan: Plan, prompt: int, answer: int, load: int) -> int:
    """Of a load, as many sequences as engine and cache hold, with half of each answer written."""
    tokens = whole_pages(prompt + answer // 2, plan.fit.page_tokens)
    per_sequence = sequence_bytes(plan.shape, plan.sizes, plan.layout, tokens)
    held = int(plan.fit.cache_bytes / per_sequence) * separate_batches(plan.layout) if per_sequence else load
    return max(1, min(load, plan.most_sequences, held))


def _costs(
    chips: int, per_chip: Mapping[str, float], predicted: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """What a slice-hour and a million tokens cost: output tokens, or prompt tokens of a model that writes none."""
    kind = "output" if "output_tokens_per_s" in predicted else "prefill"
    tokens_per_s = max(predicted[f"{kind}_tokens_per_s"], 1)
    name = "million_output_tokens" if kind == "output" else "million_prompt_tokens"
    return {
        option: {
            "slice_hour": round(price * chips, 2),
            name: round(price * chips / (tokens_per_s * 3600) * 1e6, 5),
        }
        for option, price in per_chip.items()
    }
