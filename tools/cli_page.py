"""Every command of `serving`, from the parser that reads them."""

import argparse
from collections.abc import Iterator

from serving.cli.parser import parser

_INTRO = """# Command line

`serving` plans, renders and looks at a service, and simulates TPU slices on this machine. `serving COMMAND --help` says the
same as this page. To start a service on a cluster use Ray's own `serve run FILE`.

| exit status | meaning |
|---|---|
| 0 | done |
| 1 | refused: one message on stderr says why and what to change |
| 2 | the arguments, or for `plan` and `manifest` the file, can't be read |
| 130 | ended by Ctrl-C or SIGTERM |"""


def page() -> str:
    """A section a command, a line an argument."""
    parts = [_INTRO]
    for name, tells, command in _commands("serving", "", parser()):
        arguments = [action for action in command._actions if action.dest != "help"]  # noqa: SLF001  argparse lists them nowhere else
        is_group = any(isinstance(action, argparse._SubParsersAction) for action in arguments)  # noqa: SLF001
        own = [action for action in arguments if not isinstance(action, argparse._SubParsersAction)]  # noqa: SLF001
        if is_group and not own:
            continue
        parts += [f"## `{name}`", f"{tells[:1].upper()}{tells[1:]}."]
        if own:
            lines = ["| argument | what it is |", "|---|---|"]
            lines += [f"| {_spelling(action)} | {_meaning(action)} |" for action in own]
            parts.append("\n".join(lines))
        if is_group:
            parts.append("It may also stand before the action: `serving sim --name NAME status`.")
    return "\n\n".join(parts)


def _commands(
    name: str, tells: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    yield name, tells, parser
    for action in parser._actions:  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}  # noqa: SLF001
            for word, inner in action.choices.items():
                yield from _commands(f"{name} {word}", helps[word], inner)


def _spelling(action: argparse.Action) -> str:
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.choices:
        value = "|".join(str(choice) for choice in action.choices)
    value = value.replace("|", " or ")  # a bar ends a table's cell
    if not action.option_strings:
        return f"`{value}`"
    return f"`{', '.join(action.option_strings)}{f' {value}' if action.nargs != 0 else ''}`".replace(
        "|", "\\|"
    )


def _meaning(action: argparse.Action) -> str:
    tells = (action.help or "").replace("|", "\\|")
    default = action.default
    if default not in (None, False, "", []) and "default" not in tells and action.option_strings:
        tells = f"{tells} (default: {default})".strip()
    return tells or "-"
