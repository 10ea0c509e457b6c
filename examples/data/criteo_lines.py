"""Lines in Criteo's format, parsed a few megabytes at a time with numpy: no Python loop over lines or columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

N_INTEGERS = 13
N_CATEGORIES = 26
COLUMNS = 1 + N_INTEGERS + N_CATEGORIES
#: 18 digits always fit into int64, 16 hexadecimal digits into uint64.
INTEGER_DIGITS = 18
HEX_DIGITS = 16

_NIBBLE = np.full(256, 255, dtype=np.uint8)
for _value, _characters in enumerate("0123456789"):
    _NIBBLE[ord(_characters)] = _value
for _value, _characters in enumerate(("aA", "bB", "cC", "dD", "eE", "fF"), start=10):
    _NIBBLE[[ord(c) for c in _characters]] = _value


@dataclass(frozen=True)
class ParsedLines:
    """The good lines of a block, n of them, and where they and the bad ones are.

    ``labels`` [n] uint8; ``integers`` [n, 13] int64 and ``categories`` [n, 26] uint64, zero where
    ``missing_integers`` or ``missing_categories`` (bool) says so; ``index`` [n]: which line of the block, from zero;
    ``start`` [n]: its first byte; ``bad``: (line, reason) in order; ``lines``: good and bad ones together.
    """

    labels: NDArray[np.uint8]
    integers: NDArray[np.int64]
    missing_integers: NDArray[np.bool_]
    categories: NDArray[np.uint64]
    missing_categories: NDArray[np.bool_]
    index: NDArray[np.int64]
    start: NDArray[np.int64]
    bad: list[tuple[int, str]]
    lines: int

    def __len__(self) -> int:
        return len(self.labels)


def parse_lines(block: bytes) -> ParsedLines:
    r"""Parse whole lines, each ended by ``\n`` or ``\r\n``."""
    text = np.frombuffer(block, dtype=np.uint8)
    newline = np.flatnonzero(text == ord("\n"))
    start = np.concatenate([np.zeros(1, np.int64), newline[:-1] + 1]) if len(newline) else newline
    end = newline - ((newline > start) & (text[newline - 1] == ord("\r")))

    reasons: dict[int, str] = {}

    def keep(good: NDArray[np.bool_], index: NDArray[np.int64], reason: str) -> NDArray[np.bool_]:
        reasons.update(dict.fromkeys(index[~good].tolist(), reason))
        return good

    index = np.arange(len(newline))
    good = keep(end > start, index, "blank line")
    index = index[good]
    tab = np.flatnonzero(text == ord("\t"))
    first = np.searchsorted(tab, start[index])
    good = keep(np.searchsorted(tab, end[index]) - first == COLUMNS - 1, index, f"not {COLUMNS} columns")
    index, first = index[good], first[good]

    # Where each column begins and how wide it is, [n, 40].
    tabs = tab[first[:, None] + np.arange(COLUMNS - 1)] if len(index) else np.zeros((0, COLUMNS - 1), np.int64)
    begin = np.concatenate([start[index, None], tabs + 1], axis=1)
    width = np.concatenate([tabs, end[index, None]], axis=1) - begin
    integer, category = slice(1, 1 + N_INTEGERS), slice(1 + N_INTEGERS, COLUMNS)

    label = text[begin[:, 0]] if len(index) else np.zeros(0, np.uint8)
    good_label = (width[:, 0] == 1) & ((label == ord("0")) | (label == ord("1")))
    integers, good_integer = _integers(text, begin[:, integer], width[:, integer])
    categories, good_category = _hexadecimals(text, begin[:, category], width[:, category])
    keep(good_category, index, "category is not hexadecimal")
    keep(good_integer, index, "count is not an integer")
    keep(good_label, index, "label is not 0 or 1")
    good = good_label & good_integer & good_category
    return ParsedLines(
        labels=label[good] - np.uint8(ord("0")),
        integers=integers[good],
        missing_integers=width[good, integer] == 0,
        categories=categories[good],
        missing_categories=width[good, category] == 0,
        index=index[good],
        start=start[index[good]],
        bad=sorted(reasons.items()),
        lines=len(newline),
    )


def _integers(
    text: NDArray[np.uint8], begin: NDArray[np.int64], width: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Values [n, c] of decimal numbers, and for each line whether all of them are legal."""
    negative = (width > 0) & (text[np.minimum(begin, len(text) - 1)] == ord("-"))
    begin, width = begin + negative, width - negative
    values = np.zeros(begin.shape, np.int64)
    good = (width <= INTEGER_DIGITS) & ~(negative & (width == 0))
    for place in range(min(int(width.max(initial=0)), INTEGER_DIGITS)):
        here = width > place
        digit = text[np.where(here, begin + place, 0)] - np.uint8(ord("0"))
        good &= ~here | (digit <= 9)
        values = np.where(here, values * 10 + digit, values)
    return np.where(negative, -values, values), good.all(axis=1)


def _hexadecimals(
    text: NDArray[np.uint8], begin: NDArray[np.int64], width: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Values [n, c] of hexadecimal numbers, and for each line whether all of them are legal."""
    values = np.zeros(begin.shape, np.uint64)
    good = width <= HEX_DIGITS
    for place in range(min(int(width.max(initial=0)), HEX_DIGITS)):
        here = width > place
        nibble = _NIBBLE[text[np.where(here, begin + place, 0)]]
        good &= ~here | (nibble < 16)
        values = np.where(here, (values << np.uint64(4)) | (nibble & np.uint8(15)), values)
    return values, good.all(axis=1)
