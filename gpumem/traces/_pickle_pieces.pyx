"""The stream of a pickle, checked and marked before it is unpickled.

The unpickler allocates all bytes that an opcode names, and a list as long as the highest number of
an object, so ten bytes could exhaust the memory. Here each opcode is first seen to be whole.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

from gpumem.errors import TraceError

cdef enum:
    PIECE = 1 << 20             # bytes of the file that are read at once, at least
    # Arguments of opcodes: none, fixed bytes, or a length of n bytes and then that many.
    FIXED = 16
    COUNTED = 32
    REFUSED = 48                # opcodes of classes, of outside objects, and of protocol 0
    TUPLE1 = 0x85
    TUPLE3 = 0x87
    ADDITEMS = 0x90
    FROZENSET = 0x91
    MEMOIZE = 0x94
    FRAME = 0x95
    MAX_DEPTH = 256             # of open marks

# By opcode: the kind of its arguments, and the n of the kind.
cdef unsigned char[256] _ARGUMENTS

for _kind, _codes in (
    (FIXED | 1, b"qhK\x80\x82"), (FIXED | 2, b"M\x83"), (FIXED | 4, b"Jrj\x84"),
    (FIXED | 8, b"G\x95"),
    (COUNTED | 1, b"UC\x8c\x8a"), (COUNTED | 4, b"TXB\x8b"), (COUNTED | 8, b"\x8d\x8e\x96"),
    (REFUSED, b"ciPQFILSVgp"),
):
    for _code in _codes:
        _ARGUMENTS[_code] = _kind


cdef class Pieces:
    """A file for `pickle.Unpickler`, which calls `persistent_load` with dicts and tuples.

    It adds opcodes for that behind each one that sets all items of a dict, or makes a tuple. The
    result takes its place, also where later opcodes refer to it by its number, so a small object
    may replace a dict at once. Frames are left out; each piece of whole opcodes is a frame.

    Parameters
    ----------
    file : binary file
        A pickle, from the file's position on.
    nbytes : int
        Bytes of the pickle.
    """

    cdef object file
    cdef bytes raw              # read and not yet checked
    cdef bytes piece            # checked and not yet unpickled
    cdef Py_ssize_t at          # in the piece
    cdef uint64_t nbytes
    cdef uint64_t before        # bytes of the pickle before `raw`
    cdef bint stopped
    cdef int64_t memoized       # numbers given by MEMOIZE; -1: others were given, too
    cdef bint after_dict        # the last opcode made an empty dict, or gave it its number
    cdef int64_t dict_number    # of that dict; -1: it has none yet
    cdef int64_t[MAX_DEPTH] marked  # by open mark: the number of the dict below it; -1: none
    cdef Py_ssize_t depth       # open marks

    def __init__(self, file, uint64_t nbytes):
        self.file = file
        self.nbytes = nbytes
        self.raw = self.piece = b""

    def read(self, Py_ssize_t size):
        """Return the next bytes, fewer at the end. The unpickler reads no further than a frame."""
        if self.at == len(self.piece):
            self.fill()
        cdef bytes found = self.piece[self.at:self.at + size]
        self.at += len(found)
        return found

    def readline(self):
        """Return nothing: the unpickler requires it, for opcodes that are refused."""
        return b""

    cdef int fill(self) except -1:
        # Makes the next piece, which is empty at the end.
        cdef Py_ssize_t used = 9
        cdef bytes more = b"more"
        while used == 9 and more and not self.stopped:
            more = self.file.read(max(PIECE, len(self.raw)))
            self.raw += more
            piece = bytearray(7 * len(self.raw) + 9)  # an opcode of one byte may become seven
            used = self.check(PyByteArray_AS_STRING(piece))
            piece[:9] = FRAME.to_bytes(1, "little") + (used - 9).to_bytes(8, "little")
        self.piece = bytes(piece[:used]) if used > 9 else b""
        self.at = 0
        return 0

    cdef Py_ssize_t check(self, char* piece) except -1:
        # Copies whole opcodes to the piece, from its ninth byte on; returns where they end.
        cdef const unsigned char* data = <const unsigned char*>PyBytes_AS_STRING(self.raw)
        cdef Py_ssize_t end = len(self.raw), begin = 0, at
        cdef Py_ssize_t out = 9
        cdef uint64_t size, number
        cdef unsigned char code, kind
        while begin < end and not self.stopped:
            code = data[begin]
            kind = _ARGUMENTS[code]
            if kind == REFUSED:
                raise TraceError(f"the pickle has the opcode {chr(code)!r}, "
                                 "expected plain data only")
            at = begin + 1
            size = kind & 15
            number = little(&data[at], size) if kind and end - at >= <Py_ssize_t>size else 0
            if kind & COUNTED:
                if number > self.nbytes:        # the sum might wrap
                    number = self.nbytes
                size += number
            elif code == b"r" and number > self.nbytes:
                raise TraceError(f"damaged pickle: object number {number} in {self.nbytes} bytes")
            if self.before + <uint64_t>at + size > self.nbytes:
                raise TraceError(f"damaged pickle: {self.nbytes} bytes of at least "
                                 f"{self.before + at + size}")
            if size > <uint64_t>(end - at):
                break
            at += <Py_ssize_t>size
            if code != FRAME:
                memcpy(&piece[out], &data[begin], <size_t>(at - begin))
                out += at - begin
            number = self.follow(code, data, begin + 1)
            if code in (b"u", b")", b"t") or TUPLE1 <= code <= TUPLE3:
                piece[out] = b"Q"
                out += 1
                if code == b"u" and 0 <= <int64_t>number < 1 << 32:
                    piece[out] = b"r"
                    memcpy(&piece[out + 1], &number, 4)
                    out += 5
            begin = at
            self.stopped = code == b"."
        self.before += <uint64_t>begin
        self.raw = self.raw[begin:]
        return out

    cdef int64_t follow(self, unsigned char code, const unsigned char* data,
                        Py_ssize_t begin) except -2:
        # Tracks marks and numbers; returns the number of the dict if the opcode sets its items.
        cdef int64_t number = -1
        if code == MEMOIZE and self.memoized >= 0:
            number = self.memoized
            self.memoized += 1
        elif code in (b"q", b"r"):
            self.memoized = -1
            number = <int64_t>little(&data[begin], 1 if code == b"q" else 4)
        if code == b"}":
            self.after_dict = True
            self.dict_number = -1
            return -1
        if self.after_dict and number >= 0:
            self.dict_number = number
            return -1
        if code == b"(":
            if self.depth == MAX_DEPTH:
                raise TraceError(f"the pickle is nested {MAX_DEPTH + 1} deep, "
                                 f"expected at most {MAX_DEPTH}")
            self.marked[self.depth] = self.dict_number if self.after_dict else -1
            self.depth += 1
            number = -1
        elif code in (b"u", b"e", b"t", b"l", b"d", b"1", b"o", b"i", ADDITEMS, FROZENSET):
            number = -1
            if self.depth > 0:
                self.depth -= 1
                number = self.marked[self.depth]
        self.after_dict = False
        return number


cdef inline uint64_t little(const unsigned char* data, uint64_t size) noexcept:
    cdef uint64_t number = 0
    memcpy(&number, data, <size_t>size)
    return number
