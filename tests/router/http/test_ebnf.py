import pytest

from serving.router.http.ebnf import problem

pytestmark = pytest.mark.unit


def halves(levels: int, last: str) -> str:
    """Rules of two of the next one each."""
    rules = "\n".join(f"r{at} ::= r{at + 1} r{at + 1}" for at in range(levels))
    return f"root ::= r0\n{rules}\nr{levels} ::= {last}"


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ("root ::= root", "rule root never ends"),
        ('root ::= "" root', "rule root never ends"),
        ('root ::= ("a" | root) root', "rule root never ends"),
        ('root ::= a\na ::= "x" b\nb ::= "y" a', "rule root never ends"),
        ('root ::= "x"\na ::= a', "rule a never ends"),
        ('root ::= ("a" (root))', "rule root never ends"),
        ("start: start", "rule start never ends"),
        ('root ::= root root | "a" | ""', "rule root can stand for nothing in too many ways"),
        ('root ::= a b\na ::= "" | b a\nb ::= "" | a b', "in too many ways"),
        ("root ::= a a\na ::= root?", "in too many ways"),
        ('root ::= ("a" | root)?', "in too many ways"),
        (halves(12, '"a" | ""'), "in too many ways"),
        (halves(1000, '"a"?'), "in too many ways"),
        ("(" * 9000, "it has 9000 names, texts and signs"),
    ],
)  # fmt: skip
def test_a_grammar_that_no_engine_can_write_by_is_refused(grammar: str, says: str) -> None:
    assert says in problem(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        "root ::=",
        "nothing of a grammar",
        'root ::= "a" root | "a"',
        'root ::= root "a" | ""',
        'root ::= "root ::= root"',
        "root ::= [^\\]\"(]* '(' # root ::= root",
        'root ::= item ("," item)*\nitem ::= ws [a-z]+ ws\nws ::= [ \\t]*',
        'root ::= (root "a")? "b"',
        'root ::= "a"{0,5} ("b" root){0,2}',
        'root ::= value\nvalue ::= "[" (value ("," value)*)? "]" | "\\"" [a-z]* "\\""',
        'root ::= TagDispatch(("<a>", root), stop_str="b")',
        'root ::= "a" (=root)',
        'start: expr\n?expr: NUMBER | expr "+" NUMBER\n%import common.NUMBER\n',
        halves(60, '"a"'),
        halves(5, '"a" | ""'),
    ],
)
def test_other_grammars_are_for_an_engine_to_read(grammar: str) -> None:
    assert problem(grammar) == ""
