from pathlib import Path
from random import Random

import pytest

import keys
from bad_input import BadInputError
from prompts import TURNS, Prompts, Sizes
from traces import Record

pytestmark = pytest.mark.unit


def words(text: str) -> int:
    return len(text.split())


def test_the_same_seed_asks_the_same() -> None:
    first, second, other = (Prompts(seed, Sizes()) for seed in ("1", "1", "2"))
    for kind in (Prompts.short_chat, Prompts.long_chat, Prompts.turn, Prompts.completion, Prompts.rag):
        assert kind(first) == kind(second) != kind(other)


def test_kinds_differ_in_length_as_they_say() -> None:
    prompts = Prompts("1", Sizes(prompt_words=50))

    def mean(kind: str) -> float:
        asked = [getattr(prompts, kind)().body["messages"] for _ in range(100)]
        return sum(words(message["content"]) for messages in asked for message in messages) / len(asked)

    assert mean("short_chat") == pytest.approx(50, rel=0.2)
    assert mean("long_chat") == pytest.approx(500, rel=0.2)
    assert mean("rag") > 1500


def test_a_conversation_goes_on_from_its_answer_and_ends_after_some_turns() -> None:
    prompts = Prompts("1", Sizes())
    lengths = []
    for number in range(TURNS + 1):
        prompt = prompts.turn()
        lengths.append(len(prompt.body["messages"]))
        prompts.answered(prompt, f"answer {number}")
        if number == 1:
            roles = [message["role"] for message in prompt.body["messages"]]
            assert roles == ["system", "user", "assistant", "user"]
            assert prompt.body["messages"][2]["content"] == "answer 0"
    assert lengths == [2 * turn for turn in range(1, TURNS + 1)] + [2]


def test_a_turn_without_an_answer_is_not_followed_by_another() -> None:
    prompts = Prompts("1", Sizes())
    first, second = prompts.turn(), prompts.turn()
    assert first.conversation is not second.conversation
    prompts.answered(second, "yes")
    assert prompts.turn().conversation is second.conversation


def test_conversations_of_all_users_share_a_few_system_prompts() -> None:
    systems = {Prompts(str(user), Sizes()).turn().body["messages"][0]["content"] for user in range(100)}
    assert len(systems) == 4


def test_a_replayed_prompt_is_as_long_as_recorded_and_shares_its_first_blocks() -> None:
    prompts = Prompts("1", Sizes())
    one, other = (prompts.replay(Record(0, 1200, 7, blocks)) for blocks in ((1, 2, 3), (1, 9, 8)))
    assert words(one.body["prompt"]) == words(other.body["prompt"]) == 1200
    assert one.body["prompt"].split()[:512] == other.body["prompt"].split()[:512]
    assert one.body["prompt"].split()[512:1024] != other.body["prompt"].split()[512:1024]
    assert one.body["max_tokens"] == 7


def test_keys_are_picked_by_their_shares_and_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("interactive: {key: sk-1, share: 3}\nbatch: {key: sk-2}\n")
    loaded = keys.load(path)
    random = Random(0)
    picked = [keys.pick(loaded, random) for _ in range(4000)]
    assert sum(key == loaded[0] for key in picked) == pytest.approx(3000, rel=0.05)
    assert "sk-1" not in repr(loaded)
    assert keys.pick([], random) is None


@pytest.mark.parametrize(
    "text", ["", "- sk-1", "a: sk-1", "a: {key: 3}", "a: {key: x, share: 0}", "a: {key: x, b: 1}", "a: ["]
)
def test_a_file_that_holds_no_keys_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(BadInputError, match=r"keys\.yaml"):
        keys.load(path)
