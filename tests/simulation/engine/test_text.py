"""Answers: functions of the prompt that break off and go on anywhere."""

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.simulation.engine import schema, text, tokenizer
from serving.simulation.engine.orders import RequestError, document
from serving.simulation.engine.text import Wish

pytestmark = pytest.mark.unit

HELLO = tokenizer.render([("user", "Tell me about slices.")])


@given(st.text())
def test_every_text_survives_its_ids(said: str) -> None:
    assert tokenizer.decode(tokenizer.encode(said)) == said


@given(st.text(st.characters(categories=["Cs", "Ll"])))
def test_even_half_characters_survive_their_ids(said: str) -> None:
    once = tokenizer.decode(tokenizer.encode(said))
    assert tokenizer.encode(once) == tokenizer.encode(said)


@given(st.lists(st.integers(0, 2**63 - 1)))
def test_any_number_is_an_id_and_stands_for_some_text(ids: list[int]) -> None:
    assert isinstance(tokenizer.decode(ids), str)


def test_english_takes_about_four_letters_a_token() -> None:
    said = (
        "A slice is a set of chips joined by fast links, and a host is a machine that carries some of them. "
        * 10
    )
    assert 3.5 < len(said) / len(tokenizer.encode(said)) < 6


@settings(max_examples=40, deadline=None)
@given(st.text(min_size=1), st.integers(0, 80))
def test_an_answer_goes_on_word_for_word_from_its_ids(said: str, sent: int) -> None:
    prompt = tokenizer.render([("user", said)])
    whole = text.answer(prompt, Wish(most=100, ignore_end=True))
    rest = text.answer([*prompt, *whole.tokens[:sent]], Wish(most=100 - sent, ignore_end=True))
    assert whole.tokens[sent:] == rest.tokens
    assert whole.texts[sent:] == rest.texts


@settings(max_examples=40, deadline=None)
@given(st.text(), st.integers(1, 80))
def test_an_answer_goes_on_word_for_word_from_its_text(said: str, sent: int) -> None:
    whole = text.answer(tokenizer.render([("user", said)]), Wish(most=100, ignore_end=True))
    begun = [("user", said), ("assistant", "".join(whole.texts[:sent]))]
    rest = text.answer(tokenizer.render(begun, unfinished=True), Wish(most=100 - sent, ignore_end=True))
    assert whole.tokens[sent:] == rest.tokens


def test_a_completion_goes_on_from_its_text_too() -> None:
    prompt = "Once upon a time"
    whole = text.answer(tokenizer.encode(prompt), Wish(most=60, ignore_end=True))
    begun = prompt + "".join(whole.texts[:17])
    rest = text.answer(tokenizer.encode(begun), Wish(most=43, ignore_end=True))
    assert begun + "".join(rest.texts) == prompt + "".join(whole.texts)


def test_prompts_choices_and_seeds_differ_in_their_answers_and_nothing_else_does() -> None:
    wishes = [Wish(most=20), Wish(most=20, choice=1), Wish(most=20, seed=7)]
    said = {tuple(text.answer(HELLO, wish).tokens) for wish in wishes}
    said.add(tuple(text.answer(tokenizer.render([("user", "Hello")]), Wish(most=20)).tokens))
    assert len(said) == 4
    assert text.answer(HELLO, Wish(most=20)) == text.answer(HELLO, Wish(most=20))


def test_answers_end_by_themselves_within_some_hundred_tokens() -> None:
    found = [text.answer(tokenizer.render([("user", str(n))]), Wish(most=10_000)) for n in range(50)]
    assert all(each.finish == "stop" and each.texts[-1] == "" for each in found)
    assert 50 < sum(len(each.tokens) for each in found) / 50 < 400


def test_an_end_that_is_ignored_or_too_early_is_a_word_instead() -> None:
    natural = len(text.answer(HELLO, Wish(most=10_000)).tokens)
    assert text.answer(HELLO, Wish(most=natural + 50, ignore_end=True)).finish == "length"
    late = text.answer(HELLO, Wish(most=10_000, least=natural + 50))
    assert len(late.tokens) > natural + 50
    assert tokenizer.END not in late.tokens[:-1]


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_ends_the_text_before_it_or_with_it(keep: bool) -> None:
    free = "".join(text.answer(HELLO, Wish(most=60, ignore_end=True)).texts)
    stop = free[40:47]
    cut = text.answer(HELLO, Wish(most=60, ignore_end=True, stop=("never said", stop), keep_stop=keep))
    at = free.index(stop)
    assert "".join(cut.texts) == free[: at + len(stop) * keep]
    assert (cut.finish, cut.stop_reason) == ("stop", stop)


def test_a_stop_string_counts_from_the_token_after_the_least_ones_that_completes_it() -> None:
    free = text.answer(HELLO, Wish(most=60, ignore_end=True))
    early, across = "".join(free.texts[3:5]), "".join(free.texts[19:21])
    said = "".join(free.texts)
    assert said.count(early) == said.count(across) == 1
    cut = text.answer(HELLO, Wish(most=60, least=20, ignore_end=True, stop=(early, across)))
    assert "".join(cut.texts) == "".join(free.texts[:19])
    assert (cut.tokens, cut.stop_reason) == (free.tokens[:21], across)


def test_a_stop_token_ends_the_answer_without_its_text() -> None:
    free = text.answer(HELLO, Wish(most=10))
    cut = text.answer(HELLO, Wish(most=10, stop_tokens=(free.tokens[4],)))
    assert cut.tokens == free.tokens[:5]
    assert (cut.texts[-1], cut.finish, cut.stop_reason) == ("", "stop", free.tokens[4])


def test_what_was_said_of_a_recited_text_is_not_said_again() -> None:
    said = '{"city": "slice"}'
    whole = text.recite(HELLO, said, Wish(most=100))
    assert "".join(whole.texts) == said
    for sent in range(len(whole.tokens)):
        rest = text.recite([*HELLO, *whole.tokens[:sent]], said, Wish(most=100))
        assert "".join(rest.texts) == "".join(whole.texts[sent:])


def test_logprobs_are_of_the_token_and_its_place() -> None:
    rows = text.alternatives(600, 12, 4)
    assert rows[0] == (600, text.logprob(600, 12))
    assert [value for _, value in rows] == sorted((value for _, value in rows), reverse=True)
    assert all(value <= 0 for _, value in rows)
    assert text.alternatives(600, 12, 0) == []


KEYWORDS = [
    "type",
    "properties",
    "required",
    "items",
    "minItems",
    "anyOf",
    "allOf",
    "$ref",
    "enum",
    "minimum",
]


def junk_around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    words = st.sampled_from(["object", "array", "string", "integer", "#", "#/items"])
    return st.lists(inner | words) | st.dictionaries(st.sampled_from(KEYWORDS), inner | words, max_size=4)


SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]},
    {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 2, "uniqueItems": True},
    {"type": "array", "items": {"type": "integer", "minimum": 5}, "minItems": 3, "uniqueItems": True},
    {"type": "array", "prefixItems": [{"type": "null"}, {"const": 3}], "minItems": 3},
    {"type": "string", "minLength": 30, "maxLength": 30},
    {"type": "string", "maxLength": 2},
    {"type": "string", "format": "date-time"},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.1},
    {"type": "integer", "exclusiveMinimum": 3, "multipleOf": 5},
    {"type": "integer", "maximum": -3},
    {"type": "number", "exclusiveMaximum": 0},
    {"type": ["string", "null"]},
    {"anyOf": [{"not": {}}, {"type": "boolean"}]},
    {"allOf": [{"properties": {"a": {"const": 1}}}, {"required": ["a"]}], "type": "object"},
    {"type": "object", "minProperties": 2, "additionalProperties": {"type": "boolean"}},
    {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            }
        },
        "type": "object",
        "properties": {"root": {"$ref": "#/$defs/node"}},
        "required": ["root"],
    },
    {"minimum": 3},
    {"items": {}, "minItems": 1},
    True,
    {},
]


@pytest.mark.parametrize("given_schema", SCHEMAS, ids=lambda each: json.dumps(each)[:40])
def test_a_schema_is_answered_with_a_document_that_it_allows(given_schema: Any) -> None:
    jsonschema.validate(
        schema.instance(given_schema), given_schema, format_checker=jsonschema.FormatChecker()
    )


@given(st.integers(-50, 50), st.integers(0, 60), st.sampled_from([None, 1, 3, 7]))
def test_numbers_are_within_their_bounds_or_refused(low: int, width: int, grid: int | None) -> None:
    asked: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": low + width}
    if grid:
        asked["multipleOf"] = grid
    try:
        found = schema.instance(asked)
    except schema.SchemaError:
        assert not any(number % (grid or 1) == 0 for number in range(low, low + width + 1))
    else:
        jsonschema.validate(found, asked)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), junk_around, max_leaves=8))
def test_whatever_is_sent_as_a_schema_is_answered_or_refused(asked: Any) -> None:
    try:
        assert isinstance(document(asked), str)
    except RequestError as error:
        assert error.status == 400  # noqa: PT017  the other outcome


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (False, "allows no document"),
        ({"type": "string", "pattern": "a+"}, "'pattern'"),
        ({"$ref": "#/$defs/none"}, "refers to nothing"),
        ({"$ref": "https://example.com"}, "outside the schema"),
        ({"$ref": "#"}, "contains itself"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "contains itself"),
        ({"type": "set"}, "no type 'set'"),
        ({"anyOf": []}, "empty list"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "no number"),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "uniqueItems": True}, "distinct"),
    ],
)
def test_a_schema_without_a_document_is_refused_by_name(asked: Any, problem: str) -> None:
    with pytest.raises(schema.SchemaError, match=problem):
        schema.instance(asked)
