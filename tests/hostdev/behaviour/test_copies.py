"""Copies and fills: where the bytes arrive, and when the call returns."""

import ctypes

import pytest
from drivers import BLOCK

PATTERN = bytes(range(256)) * 16


def test_bytes_round_trip_through_the_device(driver):
    pointer = driver.memory(len(PATTERN))
    driver.write(pointer, PATTERN)
    assert driver.read(pointer, len(PATTERN)) == PATTERN


def test_long_copy_keeps_every_byte(driver):
    size = 20 * BLOCK + 13
    first, second = driver.memory(size), driver.memory(size)
    source = (PATTERN * (size // len(PATTERN) + 1))[:size]
    driver.write(first, source)
    driver.cuMemcpyDtoD(second, first, size)
    assert driver.read(second, size) == source


def test_copy_between_unaligned_addresses_keeps_every_byte(driver):
    size = 17 << 20
    first, second = driver.memory(size + 64), driver.memory(size + 64)
    source = (PATTERN * (size // len(PATTERN) + 1))[:size]
    driver.write(first + 3, source)
    driver.cuMemcpyDtoD(second + 17, first + 3, size)
    assert driver.read(second + 17, size) == source


def test_pageable_source_may_change_once_the_copy_returned(driver):
    stream, pointer = driver.stream(), driver.memory(4096)
    gate = driver.gate(stream)
    source = bytearray(b"a" * 4096)
    driver.cuMemcpyHtoDAsync(pointer, source, 4096, stream)
    source[:] = b"b" * 4096
    gate.open()
    driver.cuStreamSynchronize(stream)
    assert driver.read(pointer, 4096) == b"a" * 4096


def test_copy_from_pinned_memory_reads_it_in_stream_order(driver):
    stream, pointer, source = driver.stream(), driver.memory(4096), driver.pinned(4096)
    ctypes.memset(source, 1, 4096)
    gate = driver.gate(stream)
    driver.cuMemcpyHtoDAsync(pointer, source, 4096, stream)
    ctypes.memset(source, 2, 4096)
    gate.open()
    driver.cuStreamSynchronize(stream)
    assert driver.read(pointer, 4096) == b"\x02" * 4096


def test_copy_to_pageable_memory_is_done_when_it_returns(driver):
    stream, pointer = driver.stream(), driver.memory(BLOCK)
    driver.cuMemsetD8Async(pointer, 8, BLOCK, stream)
    target = bytearray(BLOCK)
    driver.cuMemcpyDtoHAsync(target, pointer, BLOCK, stream)
    assert target == b"\x08" * BLOCK


def test_synchronous_copy_waits_for_blocking_streams(driver):
    stream, pointer = driver.stream(0), driver.memory(4 * BLOCK)
    for value in range(20):
        driver.cuMemsetD8Async(pointer, value, 4 * BLOCK, stream)
    assert driver.read(pointer, 4 * BLOCK) == bytes([19]) * (4 * BLOCK)


def test_unified_copies_infer_the_direction(driver):
    pointer, pinned = driver.memory(64), driver.pinned(64)
    ctypes.memset(pinned, 7, 64)
    driver.cuMemcpy(pointer, pinned, 64)
    assert driver.read(pointer, 64) == b"\x07" * 64


def test_copying_nothing_succeeds(driver):
    pointer = driver.memory(16)
    driver.cuMemcpyHtoD(pointer, b"", 0)
    driver.cuMemsetD8(pointer, 1, 0)


def test_copy_to_an_unknown_address_is_refused(driver):
    plain = ctypes.create_string_buffer(64)
    pointer = driver.memory(64)
    address = ctypes.addressof(plain)
    assert driver.error("cuMemcpyDtoD", address, pointer, 64) == "INVALID_VALUE"
    assert driver.error("cuMemsetD8", 64, 0, 16) == "INVALID_VALUE"


@pytest.mark.parametrize(
    ("call", "width", "value"),
    [
        ("cuMemsetD8Async", 1, 0xA5),
        ("cuMemsetD16Async", 2, 0xBEEF),
        ("cuMemsetD32Async", 4, 0xDEADBEEF),
    ],
)
def test_fills_write_elements_of_their_width(driver, call, width, value):
    stream, pointer = driver.stream(), driver.memory(4096)
    driver.write(pointer, bytes(4096))
    getattr(driver, call)(pointer, value, 1000, stream)
    driver.cuStreamSynchronize(stream)
    filled = value.to_bytes(width, "little") * 1000
    assert driver.read(pointer, 4096) == filled + bytes(4096 - len(filled))


def test_misaligned_wide_fill_is_refused(driver):
    pointer = driver.memory(64)
    assert driver.error("cuMemsetD32Async", pointer + 2, 1, 4, driver.stream()) == "INVALID_VALUE"


def test_pitched_fill_leaves_the_gaps(driver):
    stream, pointer = driver.stream(), driver.memory(4 * 64)
    driver.write(pointer, bytes(4 * 64))
    driver.cuMemsetD2D8Async(pointer, 64, 1, 10, 4, stream)
    driver.cuStreamSynchronize(stream)
    assert driver.read(pointer, 4 * 64) == (b"\x01" * 10 + bytes(54)) * 4


# ---- boxes ----

KINDS = {"host": 1, "device": 2}


def box_2d(driver, width, height, **fields):
    box = driver.api.CUDA_MEMCPY2D()
    box.WidthInBytes, box.Height = width, height
    for name, value in fields.items():
        setattr(box, name, driver.api.CUmemorytype(value) if name.endswith("Type") else value)
    return box


def test_two_dimensional_copy_places_its_rows(driver):
    """3 rows of 4 bytes, from column 2 of a pitch of 16 to column 1 of a pitch of 32."""
    source, target = driver.memory(64), driver.memory(128)
    driver.write(source, bytes(range(64)))
    driver.write(target, bytes(128))
    box = box_2d(
        driver,
        4,
        3,
        srcMemoryType=2,
        srcDevice=source,
        srcPitch=16,
        srcXInBytes=2,
        srcY=1,
        dstMemoryType=2,
        dstDevice=target,
        dstPitch=32,
        dstXInBytes=1,
    )
    driver.cuMemcpy2D(box)
    driver.cuCtxSynchronize()
    expected = bytearray(128)
    for row in range(3):
        expected[row * 32 + 1 : row * 32 + 5] = range((row + 1) * 16 + 2, (row + 1) * 16 + 6)
    assert driver.read(target, 128) == bytes(expected)


def test_pageable_two_dimensional_source_may_change_once_the_copy_returned(driver):
    stream, target = driver.stream(), driver.memory(64)
    driver.write(target, bytes(64))
    source = ctypes.create_string_buffer(b"a" * 64, 64)
    gate = driver.gate(stream)
    box = box_2d(
        driver,
        4,
        2,
        srcMemoryType=1,
        srcHost=ctypes.addressof(source),
        srcPitch=8,
        dstMemoryType=2,
        dstDevice=target,
        dstPitch=16,
    )
    driver.cuMemcpy2DAsync(box, stream)
    ctypes.memset(source, ord("b"), 64)
    gate.open()
    driver.cuStreamSynchronize(stream)
    assert driver.read(target, 32) == (b"aaaa" + bytes(12)) * 2


def test_pitch_narrower_than_the_rows_is_refused(driver):
    pointer = driver.memory(4096)
    box = box_2d(
        driver,
        64,
        2,
        srcMemoryType=2,
        srcDevice=pointer,
        srcPitch=32,
        dstMemoryType=2,
        dstDevice=pointer + 2048,
        dstPitch=64,
    )
    assert driver.error("cuMemcpy2D", box) == "INVALID_VALUE"


def test_three_dimensional_copy_places_its_rows(driver):
    source, target = driver.memory(4 * 4 * 4), driver.memory(4 * 4 * 4)
    driver.write(source, bytes(range(64)))
    driver.write(target, bytes(64))
    box = driver.api.CUDA_MEMCPY3D()
    box.srcMemoryType = box.dstMemoryType = driver.api.CUmemorytype(2)
    box.srcDevice, box.dstDevice = source, target
    box.srcPitch = box.srcHeight = box.dstPitch = box.dstHeight = 4
    box.srcXInBytes = box.srcY = box.srcZ = 1
    box.WidthInBytes = box.Height = box.Depth = 2
    driver.cuMemcpy3D(box)
    driver.cuCtxSynchronize()
    expected = bytearray(64)
    for z in range(2):
        for y in range(2):
            for x in range(2):
                expected[z * 16 + y * 4 + x] = (z + 1) * 16 + (y + 1) * 4 + x + 1
    assert driver.read(target, 64) == bytes(expected)


def test_peer_copy_within_one_device_is_a_copy(driver):
    source, target, stream = driver.memory(64), driver.memory(64), driver.stream()
    driver.write(source, b"p" * 64)
    driver.cuMemcpyPeer(target, driver.context, source, driver.context, 32)
    driver.cuMemcpyPeerAsync(target + 32, driver.context, source, driver.context, 32, stream)
    driver.cuCtxSynchronize()
    assert driver.read(target, 64) == b"p" * 64
