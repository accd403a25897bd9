"""A tokenizer that needs no download: text to ids and back without loss, about four letters a token.

Text falls into words with the space before them, digits by three, and single other characters. A word of the vocabulary
is one id. Anything else is cut into pieces of at most four bytes, and a piece's id spells its bytes after a leading 1.
So every text has ids and every id spells its text. Two texts joined where a word or a character begins have the
ids of both, so an answer can be continued from its text.
"""

import re
from collections.abc import Iterable, Sequence

START, END, BODY = 0, 1, 2  # of a message; END also ends an answer
_SPECIAL = ("<|start|>", "<|end|>", "<|message|>")
_FIRST_WORD = 0x200  # the ids of pieces begin with 0x100 to 0x1ff, 0x10000 and so on
_PIECE_BYTES = 4
_PIECES = re.compile(r" ?[A-Za-z]+| ?[0-9]{1,3}|[\s\S]")

_WORDS = """
a about above across after again against all almost along already also always among an and another any are around as
ask at away back be because become before begin behind being below between both bring build but by call can carry
change check chip clear clock close cold come complete compute could count course cut data day deep device different
do does done door down draw during each early earth either end engine enough even every example eye fact fall far fast
few field fill find fire first five fix flow follow for force form found four from front full gave general get give go
good great group grow had half hand has have he head hear heat help her here high him his hold home host hour house how
however hundred idea if important in inch into is it its just keep kind knew know land large last later layer learn
least leave left less let letter life light like line list little live long look low machine made make man many mark
matter may me mean measure memory might mind model moon more morning most mother move much must my name near need never
new next night no north not note nothing notice now number object of off often old on once one only open or order other
our out over own page paper part pass pattern people piece place plain plan plant play point port possible power press
problem produce public pull put question quick quite rain reach read ready real reason record red remember replica rest
right river road rock room round rule run said same say school sea second see seem self send sentence set several shape
she ship short should show side simple since six size sky sleep slice slow small so some song soon sound south space
special stand star start state stay step still stone stop story street strong such sun sure table take talk teach tell
ten test than that the their them then there these they thing think this those though thought thousand three through
time to together token told too took top toward town travel tree true try turn two under unit until up upon us use very
voice wait walk want war warm was watch water way we week well went were what wheel when where which while white who
whole why will wind with without wonder wood word work world would write year yet you young your
"""
WORDS = tuple(_WORDS.split())


def _forms(word: str) -> tuple[str, str, str, str]:
    return f" {word}", f" {word.capitalize()}", word, word.capitalize()


_IDS = {form: _FIRST_WORD + index for index, form in enumerate(f for word in WORDS for f in _forms(word))}
_TEXTS = {index: form for form, index in _IDS.items()} | dict(enumerate(_SPECIAL))


def encode(text: str) -> list[int]:
    """The ids of a text; marks of messages in it are text like any other."""
    ids: list[int] = []
    for piece in _PIECES.findall(text):
        known = _IDS.get(piece)
        if known is not None:
            ids.append(known)
            continue
        raw = piece.encode("utf-8", "surrogatepass")
        ids += [_spell(raw[start : start + _PIECE_BYTES]) for start in range(0, len(raw), _PIECE_BYTES)]
    return ids


def decode(ids: Iterable[int]) -> str:
    """The text of ids. An id that stands for nothing is U+FFFD, and so is half a character."""
    raw = b"".join(_bytes(token) for token in ids)
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return raw.decode("utf-8", "replace")


def word(number: int, *, capital: bool, space: bool) -> int:
    """The id of a word of the vocabulary, chosen by any number."""
    return _FIRST_WORD + number % len(WORDS) * 4 + capital + 2 * (not space)


def mark(character: str) -> int:
    """The id of one ASCII character."""
    return _spell(character.encode())


def render(
    messages: Sequence[tuple[str, str]], *, answer: bool = True, unfinished: bool = False
) -> list[int]:
    """The prompt of a conversation of (role, text); `answer` asks for one, `unfinished` leaves the last turn open."""
    ids: list[int] = []
    for role, text in messages:
        ids += [START, *encode(role), BODY, *encode(text), END]
    if unfinished:
        ids.pop()
    elif answer:
        ids += [START, *encode("assistant"), BODY]
    return ids


def _spell(raw: bytes) -> int:
    return int.from_bytes(b"\x01" + raw, "big")


def _bytes(token: int) -> bytes:
    known = _TEXTS.get(token)
    if known is not None:
        return known.encode()
    raw = token.to_bytes((token.bit_length() + 7) // 8, "big")
    return raw[1:] if raw[:1] == b"\x01" and len(raw) > 1 else "\ufffd".encode()
