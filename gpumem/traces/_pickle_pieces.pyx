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
    # Arguments of opcodes: none, fixed bytes, a length of n bytes and then that many, lines.
    FIXED = 16
    COUNTED = 32
    LINES = 48
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
    (LINES | 1, b"FILSVgpP"), (LINES | 2, b"ci"),
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
        """Return the next bytes, fewer at the end."""
        if self.at == len(self.piece):
            self.fill()
        cdef bytes found = self.piece[self.at:self.at + size]
        self.at += len(found)
        while len(found) < size and self.fill():
            found += self.piece[:size - len(found)]
            self.at = min(size, len(self.piece))
        return found

    def readline(self):
        """Return the rest of a line of the piece."""
        if self.at == len(self.piece):
            self.fill()
        cdef Py_ssize_t end = self.piece.find(b"\n", self.at) + 1
        cdef bytes found = self.piece[self.at:end or len(self.piece)]
        self.at += len(found)
        return found

    cdef bint fill(self) except -1:
        # Makes the next piece; returns whether there is one.
        cdef Py_ssize_t used = 0
        cdef bytes more
        while not self.stopped:
            more = self.file.read(max(PIECE, len(self.raw)))
            self.raw += more
            piece = bytearray(7 * len(self.raw) + 9)  # an opcode of one byte may become seven
            used = self.check(PyByteArray_AS_STRING(piece), not more)
            if used > 9:
                piece[:9] = FRAME.to_bytes(1, "little") + (used - 9).to_bytes(8, "little")
                self.piece = bytes(piece[:used])
                self.at = 0
                return True
            if not more:
                break
        self.piece = b""
        self.at = 0
        return False

    cdef Py_ssize_t check(self, char* piece, bint last) except -1:
        # Copies whole opcodes to the piece, from its ninth byte on; returns where they end.
        cdef const unsigned char* data = <const unsigned char*>PyBytes_AS_STRING(self.raw)
        cdef Py_ssize_t end = len(self.raw), begin = 0, at
        cdef Py_ssize_t out = 9
        cdef uint64_t size, number
        cdef unsigned char code, kind
        while begin < end:
            code = data[begin]
            kind = _ARGUMENTS[code]
            at = begin + 1
            size = kind & 15
            if kind & LINES == LINES:
                for _ in range(<Py_ssize_t>size):
                    at = self.raw.find(b"\n", at) + 1
                    if at == 0:
                        break
                if at == 0:
                    if not last:
                        break
                    raise TraceError(f"damaged pickle: {self.nbytes} bytes of an unended line")
            elif kind:
                if kind & COUNTED and end - at >= <Py_ssize_t>size:
                    size += little(&data[at], size)
                # A length of eight bytes may wrap the sum.
                number = little(&data[at], 8) if code == FRAME and end - at >= 8 else 0
                if size + number > self.nbytes or number > self.nbytes or size < (kind & 15) or (
                        self.before + <uint64_t>at + size + number > self.nbytes):
                    raise TraceError(f"damaged pickle: {self.nbytes} bytes of at least "
                                     f"{self.before + at + size + number}")
                if size > <uint64_t>(end - at):
                    if not last:
                        break
                    raise TraceError(f"damaged pickle: {self.nbytes} bytes, which end early")
                at += <Py_ssize_t>size
            self.check_meaning(code, data, begin + 1, at)
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
            if code == b".":
                self.stopped = True
                break
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
        elif code in (b"q", b"r", b"p"):
            self.memoized = -1
            if code != b"p":
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

    cdef int check_meaning(self, unsigned char code, const unsigned char* data, Py_ssize_t begin,
                           Py_ssize_t end) except -1:
        cdef uint64_t number = 0
        if code in (b"P", b"Q"):
            raise TraceError("the pickle refers to outside objects, expected plain data only")
        if code == b"r":
            number = little(&data[begin], 4)
        elif code == b"p":
            text = self.raw[begin:end].strip()
            number = int(text) if text.isdigit() and len(text) < 19 else self.nbytes + 1
        if number > self.nbytes:
            raise TraceError(
                f"damaged pickle: object number {number} in {self.nbytes} bytes")
        return 0


cdef inline uint64_t little(const unsigned char* data, uint64_t size) noexcept:
    cdef uint64_t number = 0
    memcpy(&number, data, <size_t>size)
    return number
