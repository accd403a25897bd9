"""Every error of this project, from the tree in serving/errors.py: its docstrings say when, and then what to do."""

import inspect

from serving.errors import ServingError

_INTRO = """# Errors

Every error says what was asked, what there is and what to change. Over HTTP it has OpenAI's shape (Anthropic's on
`/v1/messages`), and every answer carries `X-Request-Id`:

```json
{"error": {"message": "...", "type": "invalid_request_error", "param": null, "code": "unknown_path"}}
```

Go by `code`: messages may change, codes do not. A 503 passes by itself; `Retry-After`, where it has one, says when
to try again. `x-should-retry: false` tells OpenAI's and Anthropic's clients that a 429 or 5xx lasts. An engine's own
4xx passes as the engine said it. An engine's 500 says only that the engine failed; its log says why."""


def page() -> str:
    """The tree, a table by code, and a section an error."""
    kinds = _tree(ServingError)
    tree = "\n".join(f"{'  ' * depth}{kind.__name__}" for depth, kind in kinds)
    lines = ["| code | HTTP status | type | error |", "|---|---|---|---|"]
    lines += [
        f"| `{kind.code}` | {kind.status.value} {kind.status.phrase} | `{kind.kind}` | [{kind.__name__}](#{kind.__name__.lower()}) |"
        for _, kind in sorted(kinds, key=lambda entry: entry[1].code)
    ]
    parts = [_INTRO, "## By code", "\n".join(lines), "## Tree", f"```text\n{tree}\n```"]
    for _, kind in kinds:
        when, _, remedy = (inspect.getdoc(kind) or "").partition("\n\n")
        if not remedy:
            raise LookupError(f"{kind.__name__} in serving/errors.py does not say what to do")
        parts += [
            f"## {kind.__name__}",
            f"`{kind.code}`, {kind.status.value}. {_one_line(when)}",
            f"**What to do**: {_one_line(remedy)}",
        ]
    return "\n\n".join(parts)


def _tree(kind: type[ServingError], depth: int = 0) -> list[tuple[int, type[ServingError]]]:
    """Each error below its parent, in the order of the file."""
    children = [child for child in kind.__subclasses__() if child.__module__ == kind.__module__]
    return [(depth, kind), *(entry for child in children for entry in _tree(child, depth + 1))]


def _one_line(text: str) -> str:
    return " ".join(text.split())
