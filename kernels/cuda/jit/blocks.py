"""Whole blocks of a KV cache moved in all layers at once: to records, from records, and to other blocks."""

import triton
import triton.language as tl


@triton.jit
def move_blocks(
    source,
    target,
    source_ids,
    target_ids,
    num_words,
    source_block_stride,
    source_layer_stride,
    target_block_stride,
    target_layer_stride,
    HAS_SOURCE_IDS: tl.constexpr,
    HAS_TARGET_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Words of move i, in layer l: `source[source_ids[i], l]` to `target[target_ids[i], l]`; without ids, number i.

    A program moves BLOCK words of one block in one layer; strides are in words.
    """
    move = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_words
    if HAS_SOURCE_IDS:
        source_block = tl.load(source_ids + move).to(tl.int64)
    else:
        source_block = move.to(tl.int64)
    if HAS_TARGET_IDS:
        target_block = tl.load(target_ids + move).to(tl.int64)
    else:
        target_block = move.to(tl.int64)
    words = tl.load(source + source_block * source_block_stride + layer * source_layer_stride + at, inside)
    tl.store(target + target_block * target_block_stride + layer * target_layer_stride + at, words, inside)
