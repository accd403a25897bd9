"""Reports in pages of docs/benchmarks, each between marks with its name."""


def put(text: str, name: str, report: str) -> str:
    """A text with what is between the marks of this name replaced; raises ValueError where there are no such marks."""
    begin, end = f"<!-- bench: {name} -->\n", f"<!-- /bench: {name} -->"
    before, found, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"there is no {begin.strip()} ... {end} to put the report between")
    return f"{before}{begin}\n{report.strip()}\n\n{end}{after}"


def between(text: str, name: str) -> str:
    """What is between the marks of this name; raises ValueError as `put` does."""
    put(text, name, "")
    return text.partition(f"<!-- bench: {name} -->\n")[2].partition(f"<!-- /bench: {name} -->")[0]
