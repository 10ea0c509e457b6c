"""Reading and writing of our JSON files: atomic, strict, and strict JSON (no bare NaN). No torch import.

A float that is not a number is written as ``null`` (unknown), infinities as ``"inf"`` and ``"-inf"``, so that any JSON
reader understands the files. Reading checks every key and type; what is wrong is named with its place in the file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from loka_compile.errors import CorruptFileError, StaleTableError

T = TypeVar("T")


def atomic_write(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to ``path`` so that a reader sees the old file or the new one, never a part.

    The temporary file lies in the same folder (``os.replace`` is atomic only within one file system) and is removed
    when anything fails. Missing parent folders are made.

    Raises:
        OSError: the folder cannot be written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    # Not tempfile: its files are readable by their owner alone, whatever the umask of a shared folder says.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def encode(value: Any) -> Any:
    """``value`` with every non-finite float replaced by what strict JSON can hold; mappings and sequences recurse."""
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(v) for v in value]
    return value


def dumps(value: Any, *, indent: int | None = None, sort_keys: bool = False) -> str:
    """Strict JSON text of ``value``, in which floats read back exactly as they were."""
    return json.dumps(encode(value), allow_nan=False, ensure_ascii=False, indent=indent, sort_keys=sort_keys)


def read_document(path: str | os.PathLike[str], kind: str, version: int) -> dict[str, Any]:
    """The JSON object in ``path``, after checking that it says ``"format": kind`` and the version we read.

    Raises:
        CorruptFileError: not readable as UTF-8 JSON, not an object, or not a file of this kind.
        StaleTableError: the file is of another version of the format.
        OSError: the file cannot be opened.
    """
    raw = Path(path).read_bytes()
    try:
        document = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} is not a whole JSON file ({error}). Make it anew or restore a copy.") from error
    if not isinstance(document, dict) or document.get("format") != kind:
        found = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise CorruptFileError(f'{path} is no "{kind}" file: its "format" is {found!r}')
    if document.get("version") != version:
        raise StaleTableError(
            f"{path} has format version {document.get('version')!r}, this loka_compile reads version {version}. "
            "Make the file anew with this version."
        )
    return document


def _no_constant(name: str) -> float:
    raise ValueError(f"bare {name} is not JSON; unknown numbers are null, infinities are strings")


def as_object(value: Any, where: str) -> dict[str, Any]:
    """``value`` if it is a JSON object, else CorruptFileError naming ``where``."""
    if not isinstance(value, dict):
        raise CorruptFileError(f"{where} must be an object, not {_name(value)}")
    return value


def as_list(value: Any, where: str) -> list[Any]:
    """``value`` if it is a JSON list, else CorruptFileError naming ``where``."""
    if not isinstance(value, list):
        raise CorruptFileError(f"{where} must be a list, not {_name(value)}")
    return value


def as_float(value: Any, where: str) -> float:
    """A float from its JSON form (see the module's text), else CorruptFileError naming ``where``."""
    if value is None:
        return math.nan
    if value in ("inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CorruptFileError(f'{where} must be a number, null, "inf" or "-inf", not {value!r}')
    try:
        return float(value)
    except OverflowError as error:
        raise CorruptFileError(f"{where} is too large for a float: {str(value)[:20]}...") from error


def as_int(value: Any, where: str) -> int:
    """A whole number, else CorruptFileError naming ``where``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise CorruptFileError(f"{where} must be a whole number, not {value!r}")
    return value


def as_str(value: Any, where: str, *, non_empty: bool = False) -> str:
    """A string, else CorruptFileError naming ``where``."""
    if not isinstance(value, str) or (non_empty and not value.strip()):
        raise CorruptFileError(f"{where} must be a {'non-empty ' if non_empty else ''}string, not {value!r}")
    return value


def record(cls: type[T], value: Any, where: str, **ready: Any) -> T:
    """An instance of dataclass ``cls`` from a JSON object whose fields are str, int and float.

    Fields given as ``ready`` are taken as they are (converted by the caller). A field with a default may be left out.

    Raises:
        CorruptFileError: an unknown or missing key, or a value of the wrong type; ``where`` and the key are named.
    """
    entry = as_object(value, where)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    unknown = sorted(set(entry) - set(fields))
    if unknown:
        raise CorruptFileError(f"{where} has unknown keys {unknown}; known are {sorted(fields)}")
    readers: dict[str, Callable[[Any, str], Any]] = {"str": as_str, "int": as_int, "float": as_float}
    values: dict[str, Any] = dict(ready)
    for name, field in fields.items():
        if name in values:
            continue
        if name in entry:
            values[name] = readers[str(field.type)](entry[name], f"{where}, key {name!r}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise CorruptFileError(f"{where} lacks the key {name!r}")
    return cls(**values)


def _name(value: Any) -> str:
    return {list: "a list", dict: "an object", str: "a string", type(None): "null"}.get(type(value), repr(value))
