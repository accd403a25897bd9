"""What Hugging Face transformers answers on the stand-in, greedy, fp32."""

import random
from pathlib import Path

PROMPT_LENGTHS = (3, 9, 17, 40, 90, 130)
TOKENS = 32


def prompts() -> list[list[int]]:
    pick = random.Random(0)
    return [[0] + [pick.randrange(6, 640) for _ in range(length)] for length in PROMPT_LENGTHS]


def greedy(checkpoint: Path) -> list[list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    answers = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
        answers.append(out[0, len(prompt) :].tolist())
    return answers
