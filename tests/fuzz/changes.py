"""Changes of an input: of its bytes, or of its values, so that the format stays readable.

A change takes the random numbers that hypothesis draws, an input and another input to borrow from,
and returns a new input. An input in another format is changed as bytes.
"""

from __future__ import annotations

import io
import json
import pickle
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any

MAX_BYTES = 1 << 16
PAGE_START, PAGE_STRIDE = 64, 1024  # of the copies in the corpus; gpumem's own pages are larger
Change = Callable[[random.Random, bytes, bytes], bytes]

_MAX_PLACES = 5000
_EDGES = (0, 1, 2, 3, 7, 8, 63, 64, 127, 255, 256, 1023, 65535, 65536, 1 << 20)
_NUMBER = re.compile(rb"\d+")
_WORDS = ("", "\0", "\x1b[31m", "²", "\u0661", "\ud800", "é" * 70, "a\nb", "a,b", "%s", "/", "-1")
_OF_ONNX = ("x", "y", "w", "n", "Relu", "If", "Loop", "Constant", "Reshape", "ai.onnx")


def interesting(rng: random.Random) -> int:
    """Return a number at which readers fail: a power of two, a neighbour of one, or negative."""
    if rng.random() < 0.3:
        return rng.choice(_EDGES)
    number = (1 << rng.choice((7, 8, 15, 16, 31, 32, 47, 48, 53, 62, 63, 64))) + rng.randint(-2, 1)
    return -number if rng.random() < 0.2 else number


def mutate(rng: random.Random, data: bytes, other: bytes, tokens: Sequence[bytes] = ()) -> bytes:
    """Return the bytes after one to eight changes; `other` lends parts."""
    changed = bytearray(data)
    for _ in range(1 << rng.randrange(4)):
        span, lent = _span(rng, changed), other[_span(rng, other)]
        match rng.randrange(8):
            case 0 if changed:
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            case 1:
                del changed[span.start : rng.choice((span.stop, len(changed)))]
            case 2:
                changed[span] = changed[span] * rng.choice((2, 2, 3, 17))
            case 3:
                changed[span.start : rng.choice((span.start, span.stop, len(changed)))] = lent
            case 4:
                width = rng.choice((1, 2, 4, 8))
                number = interesting(rng) & ((1 << 8 * width) - 1)
                order = rng.choice(("little", "big"))
                changed[span.start : span.start + width] = number.to_bytes(width, order)
            case 5 if found := list(_NUMBER.finditer(changed)):
                place = rng.choice(found)
                long = rng.random() < 0.1
                text = "9" * rng.choice((20, 400, 5000)) if long else str(interesting(rng))
                changed[place.start() : place.end()] = text.encode()
            case _:
                word = rng.choice(tokens or (b"\0", b"\x7f", b"\x80", b"\xff"))
                changed[span.start : span.start + len(word) * rng.randrange(2)] = word
    return bytes(changed[:MAX_BYTES])


def _span(rng: random.Random, data: bytes | bytearray) -> slice:
    begin = rng.randrange(len(data) + 1)
    return slice(begin, min(begin + (1 << rng.randrange(9)), len(data)))


# ---- JSON and pickles ----------------------------------------------------------------------------


def in_json(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Change values of a JSON text."""
    try:
        changed = _values_changed(rng, json.loads(data), json.loads(other))
        return json.dumps(changed).encode()[:MAX_BYTES]
    except (ValueError, RecursionError, OverflowError):
        return mutate(rng, data, other)


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError


def in_pickle(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Change values of a pickle of plain values."""
    try:
        value, donor = (_Plain(io.BytesIO(each)).load() for each in (data, other))
        return pickle.dumps(_values_changed(rng, value, donor), rng.randrange(6))[:MAX_BYTES]
    except Exception:  # whatever a damaged pickle raises
        return mutate(rng, data, other)


def _values_changed(rng: random.Random, value: Any, other: Any) -> Any:
    """Return nested lists and dicts of plain values with one, two or four places changed."""
    for _ in range(1 << rng.randrange(3)):
        holders = _places(value)
        if not holders or rng.random() < 0.02:
            value = _leaf(rng, value)
            continue
        holder, key = rng.choice(holders)
        donors = [holder[key] for holder, key in _places(other)] or [None]
        match rng.randrange(7):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[str(_leaf(rng, key))] = holder.pop(key)
            case 1:
                holder.insert(key, _copied(holder[key]))
            case 2:
                holder[key] = _copied(rng.choice(donors))
            case 3:
                holder[key] = rng.choice(([], {}, [holder[key]], {"": holder[key]}, None))
            case _:
                holder[key] = _leaf(rng, holder[key])
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return holders of values in nested lists and dicts, each with the key of a value there.

    A pickle can hold one list a million times, or itself: only the first thousands are found.
    """
    found: list[tuple[Any, Any]] = []
    left = [value]
    while left and len(found) < _MAX_PLACES:
        holder = left.pop()
        if isinstance(holder, list):
            found += [(holder, key) for key in range(len(holder))]
            left += holder
        elif isinstance(holder, dict):
            found += [(holder, key) for key in holder]
            left += holder.values()
    return found


def _copied(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _leaf(rng: random.Random, value: Any) -> Any:
    """Return another value, often of the same type."""
    if rng.random() < 0.2:
        value = rng.choice(("", 0, 0.0, None, True))
    match value:
        case bool() | None:
            return rng.choice((True, False, None, 0, 1))
        case int():
            many = 1 << rng.choice((70, 1030, 20_000))
            return rng.choice((interesting(rng), value + 1, value - 1, many, float(value % 1000)))
        case float():
            return rng.choice((float("nan"), float("inf"), -0.0, 1e308, 5e-324, 7))
        case str() if value and rng.random() < 0.5:
            text = mutate(rng, value.encode("utf-8", "replace"), b"")
            return text.decode("utf-8", "replace")
        case str() | bytes():
            return rng.choice((*_WORDS, str(interesting(rng)), value * 2))
        case _:
            return rng.choice((None, 0, "", [], {}))


# ---- archives, slots, pages ----------------------------------------------------------------------


def in_zip(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Change members of an archive and write their checksums anew."""
    try:
        members, donors = _members(data), list(_members(other).values())
    except Exception:  # zipfile raises many for damaged archives
        return mutate(rng, data, other)
    if not members:
        return data
    name = rng.choice(list(members))
    match rng.randrange(8):
        case 0:
            del members[name]
        case 1:
            members["x" + rng.choice(_WORDS[2:5])] = members.pop(name)
        case 2 if donors:
            members[name] = rng.choice(donors)
        case 3 | 4 | 5:
            members[name] = _array_changed(rng, members[name])
        case _:
            members[name] = mutate(rng, members[name], rng.choice(donors or [b""]))
    made = io.BytesIO()
    kind = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(made, "w", kind) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return made.getvalue()[:MAX_BYTES]


def _members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = [info for info in archive.infolist() if info.file_size < MAX_BYTES]
        return {info.filename: archive.read(info) for info in infos}


def _array_changed(rng: random.Random, member: bytes) -> bytes:
    """Change the numbers after the header of an array in NumPy's format."""
    header = 10 + int.from_bytes(member[8:10], "little")
    width = {b"|i1": 1, b"<i2": 2, b"<i4": 4}.get(member[21:24], 8)
    body = bytearray(member[header:])
    for _ in range(1 << rng.randrange(3)):
        if len(body) >= width:
            _write_number(rng, body, rng.randrange(len(body) // width) * width, width)
    return member[:header] + bytes(body)


def _write_number(rng: random.Random, data: bytearray, at: int, width: int) -> None:
    number = rng.choice((interesting(rng), rng.randrange(12))) & ((1 << 8 * width) - 1)
    data[at : at + width] = number.to_bytes(width, "little")


def slots(header: int, size: int, fields: tuple[tuple[int, int], ...]) -> Change:
    """Make a change of slots of one size after a header: fields are offset and width."""

    def change(rng: random.Random, data: bytes, other: bytes) -> bytes:
        body, lent = data[header:], other[header:]
        found = [bytearray(body[at : at + size]) for at in range(0, len(body), size)]
        for _ in range(1 << rng.randrange(4)):
            at = rng.randrange(len(found) + 1)
            match rng.randrange(8):
                case 0:
                    del found[at : at + rng.randrange(4)]
                case 1 if lent:
                    begin = rng.randrange(len(lent) // size + 1) * size
                    found.insert(at, bytearray(lent[begin : begin + size]))
                case 2 if at < len(found):
                    found.insert(rng.randrange(len(found)), found.pop(at))
                case 3 if at < len(found):
                    found[at:at] = [bytearray(found[at]) for _ in range(rng.choice((1, 1, 2, 40)))]
                case _ if at < len(found):
                    _write_number(rng, found[at], *rng.choice(fields))
        return (data[:header] + b"".join(found))[:MAX_BYTES]

    return change


def checksummed(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Change a live page, and mostly correct the CRCs of its two copies."""
    page = bytearray(mutate(rng, data, other))
    for begin in (PAGE_START, PAGE_START + PAGE_STRIDE):
        if len(page) >= begin + 8 and rng.random() < 0.9:
            (length,) = struct.unpack_from("<I", page, begin + 4)
            length = min(length, len(page) - begin, PAGE_STRIDE)
            crc = zlib.crc32(page[begin + 4 : begin + length])
            struct.pack_into("<II", page, begin, crc, length)
    return bytes(page)


# ---- ONNX models ---------------------------------------------------------------------------------


def in_onnx(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Change fields of an ONNX model."""
    import onnx

    model, donor = onnx.ModelProto(), onnx.ModelProto()
    try:
        model.ParseFromString(data)
        donor.ParseFromString(other)
    except Exception:  # of protobuf's own kinds
        return mutate(rng, data, other)
    for _ in range(1 << rng.randrange(3)):
        _change_message(rng, rng.choice(_messages(model)), _messages(donor))
    return bytes(model.SerializeToString())[:MAX_BYTES]


def _messages(message: Any, depth: int = 0) -> list[Any]:
    found = [message]
    for field, value in message.ListFields() if depth < 12 else ():
        if field.message_type is not None:
            for each in value if field.is_repeated else (value,):
                found += _messages(each, depth + 1)
    return found


def _change_message(rng: random.Random, message: Any, donors: list[Any]) -> None:
    given = [field for field, _ in message.ListFields()]
    field = rng.choice(given if given and rng.random() < 0.8 else list(message.DESCRIPTOR.fields))
    name = field.name
    alike = [each for each in donors if each.DESCRIPTOR is field.message_type]
    if rng.random() < 0.15:
        message.ClearField(name)
    elif field.is_repeated:
        held = getattr(message, name)
        if held and rng.random() < 0.4:
            del held[rng.randrange(len(held))]
        elif field.message_type is None:
            held.append(_scalar(rng, field))
        elif alike or held:
            held.add().CopyFrom(rng.choice([*held, *alike]))
    elif field.message_type is None:
        setattr(message, name, _scalar(rng, field))
    elif alike:
        getattr(message, name).CopyFrom(rng.choice(alike))


def _scalar(rng: random.Random, field: Any) -> Any:
    """Return a value that the type of a field accepts."""
    kind = field.cpp_type
    if kind == field.CPPTYPE_STRING:
        text = rng.choice((*_OF_ONNX, *_WORDS[:5]))
        return text.encode() if field.type == field.TYPE_BYTES else text
    if kind in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
        return rng.choice((0.0, float("nan"), float("inf"), -1.0, 1e30))
    if kind == field.CPPTYPE_ENUM:
        return rng.choice([each.number for each in field.enum_type.values])
    bits = 32 if kind in (field.CPPTYPE_INT32, field.CPPTYPE_UINT32) else 64
    number = rng.choice((interesting(rng), rng.randrange(20))) & ((1 << bits) - 1)
    signed = kind in (field.CPPTYPE_INT32, field.CPPTYPE_INT64)
    return number - (1 << bits) if signed and number >> (bits - 1) else number
