"""Reads the rules of a grammar as far as to tell what no engine can write: rules without an end, and nothing in too many ways. Pure.

Of both notations that vLLM takes, xgrammar's EBNF (`::=`) and Lark's (`:`). What is no grammar is for an engine to refuse.
"""

import math
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import NamedTuple

# To be read in some milliseconds.
_MOST_PARTS = 8192
# xgrammar tries each way in which rules can stand for nothing: 20 rules of two of the next one each hang an engine.
_MOST_EMPTY = 1024
_TOKEN = re.compile(
    r"(?P<nothing>\s+|\#[^\n]*)"
    r"""|(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\[(?:\\.|[^\]\\])*\])"""
    r"|(?P<open>\(=?)|(?P<close>\))|(?P<or>\|)|(?P<times>[*+?]|\{[^}\n]*\})|(?P<is>::=|:)|(?P<name>[\w.-]+)|.",
    re.DOTALL,
)
_EMPTY = ('""', "''")
_MAY_MISS = re.compile(r"[*?]|\{\s*0*\s*[,}]")


class _Part(NamedTuple):
    """A part of a rule's choice: a rule by its name, or a text, which may be empty."""

    rule: str | None
    is_empty: bool
    may_miss: bool = False


_Choices = list[list[_Part]]


def problem(grammar: str) -> str:
    """Why no engine should see a grammar; empty where nothing of it speaks against that."""
    tokens = [
        (token.lastgroup, token[0], token.start())
        for token in _TOKEN.finditer(grammar)
        if token.lastgroup != "nothing"
    ]
    if len(tokens) > _MOST_PARTS:
        return f"it has {len(tokens)} names, texts and signs; send at most {_MOST_PARTS}"
    rules = _rules(grammar, tokens)
    ends = _ending(rules)
    if endless := next((name for name in rules if name not in ends), None):
        return f"rule {_named(endless)} never ends: each of its choices needs a rule that needs it again; give it a choice that does not"
    sizes = _empty_sizes(rules)
    if wide := next((name for name, size in sizes.items() if size > _MOST_EMPTY), None):
        return (
            f"rule {_named(wide)} can stand for nothing in too many ways; leave out the empty choice of a rule that it has several times, or "
            "that comes to it again"
        )
    return ""


def _named(rule: str) -> str:
    """A group stands in the rule that its name begins with."""
    return rule.partition(" ")[0][:40]


def _rules(grammar: str, tokens: Sequence[tuple[str | None, str, int]]) -> dict[str, _Choices]:
    """The choices of every rule. A group is a rule of its own, with a space in its name.

    `tokens`: the kind of each, its text and where it begins.
    """
    rules: dict[str, _Choices] = {}
    path: list[str] = []  # the rule that is read, and the groups in it
    for at, (kind, text, start) in enumerate(tokens):
        if kind == "name" and tokens[at + 1 : at + 2] and tokens[at + 1][0] == "is":
            path = [text]
            rules.setdefault(text, []).append([])
        elif not path:
            continue
        elif kind == "or":
            rules[path[-1]].append([])
        elif kind == "close":
            del path[max(1, len(path) - 1) :]
        elif kind == "times":
            if (choice := rules[path[-1]][-1]) and _MAY_MISS.match(text):
                choice[-1] = choice[-1]._replace(may_miss=True)
        elif kind == "open":
            group = f"{path[0]} {at}"
            # What stands in the brackets of a function, or ahead, is not read on its own.
            aside = text != "(" or grammar[start - 1].isalnum()
            rules[path[-1]][-1].append(_Part(group, is_empty=False, may_miss=aside))
            rules[group] = [[]]
            path.append(group)
        elif kind in ("name", "text"):
            rule = text if kind == "name" else None
            rules[path[-1]][-1].append(_Part(rule, is_empty=text in _EMPTY))
    return rules


def _ending(rules: Mapping[str, _Choices]) -> set[str]:
    """The rules that a text of finite length fits. What has no rule here is an engine's own, or its mistake to tell."""
    return _holding(
        rules,
        lambda part: None if part.may_miss or part.rule is None or part.rule not in rules else part.rule,
    )


def _empty_sizes(rules: Mapping[str, _Choices]) -> dict[str, float]:
    """Of each rule that may stand for nothing, how many rules and texts do so in all of its ways; infinite of one that comes to itself."""
    empty = _holding(rules, lambda part: None if part.may_miss or part.is_empty else part.rule or "")
    within = {name: list(_empty_parts(rules[name], empty)) for name in rules if name in empty}
    users: dict[str, list[str]] = {name: [] for name in within}
    for name, parts in within.items():
        for part in parts:
            users[part].append(name)
    missing = {name: len(parts) for name, parts in within.items()}
    sizes: dict[str, float] = {}
    todo = [name for name, count in missing.items() if not count]
    while todo:
        name = todo.pop()
        sizes[name] = min(1 + sum(sizes[part] for part in within[name]), math.inf)
        for user in users[name]:
            missing[user] -= 1
            if not missing[user]:
                todo.append(user)
    return {name: sizes.get(name, math.inf) for name in within}


def _empty_parts(choices: _Choices, empty: Container[str]) -> Iterator[str]:
    """The rules in those choices that may stand for nothing."""
    for choice in choices:
        if all(part.may_miss or part.is_empty or part.rule in empty for part in choice):
            yield from (part.rule for part in choice if part.rule is not None and part.rule in empty)


def _holding(rules: Mapping[str, _Choices], needs: Callable[[_Part], str | None]) -> set[str]:
    """The rules with a choice whose parts all hold; a part holds where it `needs` no rule, or one that holds."""
    missing: list[int] = []  # of each choice
    owners: list[str] = []
    waiting: dict[str, list[int]] = {}
    todo: list[str] = []
    for name, choices in rules.items():
        for choice in choices:
            needed = [rule for part in choice if (rule := needs(part)) is not None]
            for rule in needed:
                waiting.setdefault(rule, []).append(len(missing))
            missing.append(len(needed))
            owners.append(name)
            if not needed:
                todo.append(name)
    holding: set[str] = set()
    while todo:
        name = todo.pop()
        if name in holding:
            continue
        holding.add(name)
        for choice_at in waiting.get(name, ()):
            missing[choice_at] -= 1
            if not missing[choice_at]:
                todo.append(owners[choice_at])
    return holding
