"""A plan as plain data: what `serving plan --json` prints and its table shows."""

from collections.abc import Mapping
from typing import Any

from serving.planning import speed
from serving.planning.alternatives import Candidate
from serving.planning.cache import separate_batches, sequence_bytes
from serving.planning.fit import RESIDENT_BYTES
from serving.planning.plan import Plan
from serving.planning.prices import AS_OF, CURRENCY, chip_hour

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
            "attention_data": plan.layout.attention_data,
        },
        "reasons": list(plan.reasons),
        "parameters": {
            "total": sum(group.params for group in fit.groups),
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
        "measured": _measured(plan),
        "prices": {
            "currency": CURRENCY,
            "as_of": AS_OF,
            "options": _costs(
                slice_.chips, chip_hour(slice_.generation, prices), predicted["output_tokens_per_s"]
            ),
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


def _speed(plan: Plan) -> dict[str, Any]:
    length = plan.fit.max_model_len
    answer = min(ANSWER_TOKENS, max(length // 2, 1))
    prompt = min(PROMPT_TOKENS, max(length - answer, 1))
    predicted = _predict(plan, prompt, answer, plan.most_sequences)
    return {
        "prompt_tokens": prompt,
        "answer_tokens": answer,
        "sequences": predicted.sequences,
        "step_s": predicted.step_s,
        "decode_tokens_per_s": round(predicted.decode_tokens_per_s),
        "prefill_tokens_per_s": round(predicted.prefill_tokens_per_s),
        "output_tokens_per_s": round(speed.output_rate(predicted, prompt, answer)),
    }


def _measured(plan: Plan) -> list[dict[str, Any]]:
    rows = []
    for published in speed.measured_for(plan.shape, plan.sizes, plan.slice):
        for (prompt, answer, sequences), measured in published.tokens_per_s.items():
            predicted = speed.output_rate(_predict(plan, prompt, answer, sequences), prompt, answer)
            rows.append(
                {
                    "prompt_tokens": prompt,
                    "answer_tokens": answer,
                    "sequences": sequences,
                    "output_tokens_per_s": measured,
                    "predicted_tokens_per_s": round(predicted),
                    "off_by": round(predicted / measured - 1, 2),
                    "source": published.source,
                }
            )
    return rows


def _predict(plan: Plan, prompt: int, answer: int, sequences: int) -> speed.Speed:
    """Speed at `sequences`, or at as many as engine and cache allow, with half of each answer written."""
    context = prompt + answer // 2
    per_sequence = sequence_bytes(plan.shape, plan.sizes, plan.layout, context)
    held = (
        int(plan.fit.cache_bytes / per_sequence) * separate_batches(plan.layout)
        if per_sequence
        else sequences
    )
    at_once = max(1, min(sequences, plan.most_sequences, held))
    return speed.predict(plan.shape, plan.sizes, plan.slice, plan.layout, sequences=at_once, context=context)


def _costs(chips: int, per_chip: Mapping[str, float], tokens_per_s: float) -> dict[str, dict[str, float]]:
    return {
        option: {
            "slice_hour": round(price * chips, 2),
            "million_output_tokens": round(price * chips / (tokens_per_s * 3600) * 1e6, 3),
        }
        for option, price in per_chip.items()
    }
