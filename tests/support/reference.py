"""What Hugging Face transformers answers on the stand-in, greedy, fp32, and what the service does."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.service import Service

PROMPT_LENGTHS = (3, 9, 17, 40, 90, 130)
TOKENS = 24


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


def embeddings(checkpoint: Path, texts: list[str]) -> list[list[float]]:
    """The last token's hidden state, of length one."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(checkpoint).eval(), AutoTokenizer.from_pretrained(checkpoint)
    found = []
    for text in texts:
        with torch.no_grad():
            last = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1]
        found.append(torch.nn.functional.normalize(last, dim=0).tolist())
    return found


def answers(running: Service) -> list[list[int]]:
    """The service's tokens for the same prompts, asked for all at once."""

    def one(prompt: list[int]) -> list[int]:
        fields = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = running.post("/v1/completions", prompt=prompt, **fields)
        return list(answer.json()["choices"][0]["token_ids"])

    with ThreadPoolExecutor(len(PROMPT_LENGTHS)) as pool:
        return list(pool.map(one, prompts()))
