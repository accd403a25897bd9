"""The stand-in model of simulated hosts: a seeded tiny Llama with the head counts of the model it stands for.

It has the same attention heads and KV heads, so that the plan's tensor parallelism holds for it too; all else is small.
Its tokenizer is trained on the text below. It answers with seeded nonsense, deterministically.
"""

import errno
import shutil
import tempfile
from pathlib import Path

from serving.planning import ModelShape, Plan
from serving.planning.checkpoints import folder_of

MAX_MODEL_LEN = 2048
_FORMAT = 1  # part of the folder's name: raise it when a written file changes
_HIDDEN = 256
_HEAD_DIM = 64
_VOCABULARY = 768
_SEED = 1
# Wide enough that greedy answers do not fall into one repeated token.
_INITIALIZER_RANGE = 0.06
_SPECIAL = ("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_TEMPLATE = (
    "<s>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXT = """
A slice is a set of chips joined by fast links, and a host is a machine that carries some of them. A model that is too
large for one chip is cut into parts, and each chip computes its own part of every layer. After each part the chips add
up what they have found, and the sum goes on to the next layer. A request comes in as text, the tokenizer turns it into
numbers, and the engine reads all of them at once; this is called prefill. Then it writes one token after another; this
is called decode. Many requests share the same step, so that the chips are never idle while somebody waits. When a new
request arrives it joins the batch, and when an answer is complete it leaves. The keys and values of every token that
was read are kept in pages, because they will be needed again for the next one. If two prompts begin alike, their first
pages can be shared. A router stands in front and sends every request to the slice that can answer it soonest. If a host
is lost, its slice is given up as a whole, another one takes its place, and the answer continues where it was. What time
is it? How far is the moon? Tell me a story about a lighthouse, a river and an old clock. Write a function that returns
the sum of two numbers: def add(a, b): return a + b. {"name": "value", "count": 12, "ready": true, "items": [1, 2, 3]}
"""


def checkpoint(plan: Plan, cache: Path) -> Path:
    """The checkpoint a simulated host loads: the user's own where it is a folder, else the stand-in."""
    return folder_of(plan.model.model) or ensure(plan.shape, cache, plan.pipeline)


def ensure(shape: ModelShape, cache: Path, pipeline: int = 1) -> Path:
    """The folder of the stand-in for this shape, written first where it is missing (about 10 s); raises OSError."""
    layers = max(2, pipeline)
    name = f"llama-{_FORMAT}-{shape.num_attention_heads}q-{shape.num_key_value_heads}kv-{layers}l"
    folder = cache / "stand-in" / name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
        try:
            _write(draft, shape, layers)
            draft.chmod(0o755)
            draft.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was quicker
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def _write(folder: Path, shape: ModelShape, layers: int) -> None:
    import torch  # noqa: PLC0415  seconds to import, and only here
    from safetensors import SafetensorError  # noqa: PLC0415
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: PLC0415
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    marks = {"bos_token": _SPECIAL[0], "eos_token": _SPECIAL[1], "pad_token": _SPECIAL[1]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks)
    # A round number, because the vocabulary is sharded over every device of the slice.
    fast.add_special_tokens(
        {"extra_special_tokens": [f"<|reserved_{i}|>" for i in range(_VOCABULARY - len(fast))]}
    )
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=_HEAD_DIM,
        max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
        tie_word_embeddings=False,
        initializer_range=_INITIALIZER_RANGE,
        dtype="float32",
    )
    torch.manual_seed(_SEED)
    disable_progress_bar()  # it would stand in the line of `serving sim run`
    model = LlamaForCausalLM(config).to(torch.float32)
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # of a full disk, say: in its own words alone
        raise OSError(errno.EIO, str(error)) from None
