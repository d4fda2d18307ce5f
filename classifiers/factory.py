"""FAISS factory strings, read by a grammar of our own before FAISS sees them.

FAISS takes every number on trust: HNSW0 and PCA0 end the process, HNSW1 and a string of 20,000 characters crash it. Here each part is
one that is known, stands where it may, and has numbers that make sense for so many dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from utils import BadOption

MOST_CHARACTERS = 120
MOST_LISTS, MOST_LINKS, MOST_BITS = 1 << 21, 256, 12
MOST_CODES = 1 << 13  # values in all codebooks of a residual quantizer: it makes a table of their pairs

CODE = (
    r"(?:(?:PQ|LSQ|RQ)\d+(?:x\d+)?(?:_\d+x\d+)*(?:np|fsr?)?(?:_\d+)?|PQ\d+\+\d+"
    r"|(?:PRQ|PLSQ)\d+x\d+x\d+|SQ(?:4|6|8|bf16|fp16)|LSH\d*r?t?)"
)
BEFORE = re.compile(r"(?:PCA|PCAR|PCAW|PCAWR|RR|ITQ|Pad)\d+|ITQ|L2norm|OPQ\d+(?:_\d+)?")
COARSE = re.compile(r"IVF\d+[kM]?(?:_HNSW\d+|\(IVF\d+,Flat\))?|IMI2x\d+")
WHOLE = re.compile(rf"Flat|{CODE}|HNSW\d+(?:_(?:\d+\+)?{CODE})?|HNSW\d+,Flat|NSG\d+,Flat")
STORED = re.compile(rf"Flat|{CODE}")
AFTER = re.compile(rf"RFlat|Refine\((?:Flat|{CODE})\)")

Rule = tuple[re.Pattern[str], Callable[[int], int], Callable[[int], int], str]
# Numbers of a part: where they stand, the least and the most of them for `dim` dimensions, and what they are.
NUMBERS: tuple[Rule, ...] = (
    (re.compile(r"(?:PCA|PCAR|PCAW|PCAWR|RR|ITQ|OPQ\d+_)(\d+)"), lambda dim: 1, lambda dim: dim, "dimensions"),
    (re.compile(r"Pad(\d+)"), lambda dim: dim, lambda dim: 4 * dim, "dimensions"),
    (re.compile(r"(?<![RLA-Z])O?PQ(\d+)|(?<!P)(?:RQ|LSQ)(\d+)"), lambda dim: 1, lambda dim: 4 * dim, "parts"),
    (re.compile(r"(?:HNSW|NSG)(\d+)"), lambda dim: 4, lambda dim: MOST_LINKS, "links"),
    (re.compile(r"(?:IVF|_(?=\d+\+))(\d+)"), lambda dim: 0, lambda dim: MOST_LISTS, "lists"),  # 0: told with the rows
    (re.compile(r"x(\d+)"), lambda dim: 1, lambda dim: MOST_BITS, "bits"),
    (re.compile(r"LSH(\d+)"), lambda dim: 1, lambda dim: 64 * dim, "bits"),
    (re.compile(r"PQ\d+\+(\d+)"), lambda dim: 1, lambda dim: 4 * dim, "parts"),
    (re.compile(r"(?:fsr?|np)_(\d+)"), lambda dim: 32, lambda dim: 1024, "rows a block"),
)


def check_factory(text: str, dim: int, rule: str) -> None:
    """Raises unless FAISS can be asked. `rule` begins the message."""
    if len(text) > MOST_CHARACTERS:
        raise BadOption("index", f"{rule} of at most {MOST_CHARACTERS} characters ({len(text):,} found)", text)
    parts = re.split(r",(?![^()]*\))", text)
    left = list(parts)
    while left and BEFORE.fullmatch(left[0]) and len(parts) - len(left) < 3:
        left.pop(0)
    if left and COARSE.fullmatch(left[0]):
        left.pop(0)
        stored = STORED
    else:
        stored = WHOLE
        if len(left) > 1 and left[1] == "Flat" and left[0].startswith(("HNSW", "NSG")):
            left[:2] = [f"{left[0]},Flat"]
    found = bool(left) and stored.fullmatch(left.pop(0)) is not None
    if left and AFTER.fullmatch(left[0]):
        left.pop(0)
    if not found or left:
        odd = next((part for part in parts if not any(p.fullmatch(part) for p in (BEFORE, COARSE, WHOLE, AFTER))), None)
        raise BadOption("index", rule + (f": {odd!r} is no part that is known" if odd else ": its parts do not make one"), text)
    for pattern, least, most, what in NUMBERS:
        for match in pattern.finditer(text):
            number = match[match.lastindex or 1]
            count = int(number) * {"k": 1 << 10, "M": 1 << 20}.get(text[match.end() : match.end() + 1], 1) if len(number) < 9 else 1 << 60
            if not least(dim) <= count <= most(dim):
                raise BadOption("index", f"{rule}: {match[0]} must have from {least(dim)} to {most(dim)} {what}", text)
    for count, bits in re.findall(r"(?:(?<!P)RQ|LSQ|IMI)(\d+)x(\d+)", text):
        if int(count) << int(bits) > MOST_CODES:
            raise BadOption("index", f"{rule}: {count} x {bits} bits make more than {MOST_CODES} values", text)
