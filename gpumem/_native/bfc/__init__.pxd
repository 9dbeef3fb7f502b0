"""The chunk table: best fit with coalescing."""

from gpumem._native.bfc.table cimport (
    ABSURD, ANY_EPOCH, Bfc, bfc_add_region, bfc_add_stream_slot, bfc_allocate, bfc_allocate_at,
    bfc_allocate_from, bfc_allocate_region, bfc_begin_pending_free, bfc_block_size, bfc_check,
    bfc_end_pending_free, bfc_expect_free, bfc_free, bfc_free_all, bfc_has, bfc_init, bfc_invariant,
    bfc_largest_free, bfc_lowest, BFC_MAY_SWAP, BFC_NO_METADATA, bfc_note_swap, BFC_OK,
    bfc_region_is_idle, bfc_release_completed, bfc_remove_region, bfc_resolve, bin_from, bin_of,
    Chunk, CHUNK_CACHED, CHUNK_FREE, CHUNK_HOLE, CHUNK_PENDING_FREE, CHUNK_UNUSED, CHUNK_USED,
    gm_low_bit64, handle_of, MAX_BYTES, NIL, QUANTUM, QUANTUM_BITS, Region,
    round_to_quantum, SLOT_RELEASED, slots_ready, SPLIT_EXACT, SPLIT_NEVER, SPLIT_ORT, SPLIT_TIGHT,
    state_of, StreamBins,
)
from gpumem._native.bfc.holes cimport (
    bfc_allocate_across, bfc_allocate_range, bfc_free_around, holes_add_range, holes_allocate,
    holes_carve, holes_fill, holes_trim, holes_undo_allocate,
)
