"""Buffers, resources, streams and their order."""

from gpumem._buffer.buffer cimport (
    access_begin, access_end, array_owner, Buffer, buffer_end, buffer_hand_over, buffer_lease,
    buffer_note_consumer, buffer_of, buffer_share, drop_share, empty_buffer, note_discarded, Place,
    PLACE_EXPORTABLE, PLACE_FIXED, PLACE_SLEEPS, raise_discarded, require_open, ResourceBase,
)
from gpumem._buffer.dlpack cimport (
    call_first, DL_BFLOAT, DL_BOOL, DL_COMPLEX, DL_CPU, DL_CUDA, DL_CUDA_HOST, DL_CUDA_MANAGED,
    DL_FLOAT, DL_FLOAT8_E3M4, DL_FLOAT8_E4M3, DL_FLOAT8_E4M3B11FNUZ, DL_FLOAT8_E4M3FN,
    DL_FLOAT8_E4M3FNUZ, DL_FLOAT8_E5M2, DL_FLOAT8_E5M2FNUZ, DL_FLOAT8_E8M0FNU, DL_INT, DL_IS_COPIED,
    DL_READ_ONLY, DL_UINT, DLDataType, DLDevice, DLManagedTensorVersioned, dlpack_capsule,
    dlpack_check_stream, dlpack_delete, dlpack_device_from, dlpack_export, DLPACK_MAJOR,
    DLPACK_NEWEST_MINOR, dlpack_peek, dlpack_read_call, dlpack_take, dlpack_wants_versioned,
    DLPackCall, DLTensor, exchange_capsule, exchange_table, Export, Incoming, incoming_versioned,
    same_device, set_error, vectorcall,
)
from gpumem._buffer.ledger cimport (
    BlockLedger, counted_fields, DEFAULT_SLOT, ledger_cancel, ledger_copy_blocks, ledger_count_call,
    ledger_counters, ledger_deliver, ledger_drop, ledger_end, ledger_is_default, ledger_keep,
    ledger_lease, ledger_make, ledger_move, ledger_order_uses, ledger_reset_peaks, ledger_return,
    ledger_stream, LedgerBlock, LedgerCounters,
)
from gpumem._buffer.resource cimport (
    alignment_in, alignment_of, BorrowedMemory, HOOK_OF_RUN, HOOK_OF_TOP, MemoryResource,
    resource_adapt, resource_begin, resource_charge, resource_claim, resource_deliver,
    resource_init, set_resource_hook, size_of,
)
from gpumem._buffer.stream cimport (
    device_of_stream, finish_stream, has_uses, host_may_read, host_may_write, is_capturing,
    keeps_itself, order_after, order_before, order_host, order_host_slowly, order_host_writing,
    order_read, order_settled, order_stream, order_written, own_stream, Stream, stream_handle,
    stream_is_capturing, wait_for_stream,
)
