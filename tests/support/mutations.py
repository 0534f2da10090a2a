"""Small faults, one at a time: does the test suite notice each of them?

Every entry of `MUTATIONS` is a fault that somebody could well make: a bound that is off
by one, a mask forgotten, a reference lost, causes in the wrong order. This program
puts them into the package one after another, runs the tests on each and takes the fault
out again. A fault that no test notices shows a hole in the suite; after a change to the
tests, the same faults must be caught as before.

It is run by hand, from any checkout of the repository, and takes an hour or so:

    python tests/support/mutations.py --check
    python tests/support/mutations.py --first-tests likely.json --output results.json
    python tests/support/mutations.py --only NAME --tests tests/attention

`--check` plays nothing and only reports whether each snippet is still found, and once.
`--first-tests` names a JSON file, `{name: [test files]}`: the tests that should notice,
which are run before all others. `--tests` names tests to run in place of the whole
suite. Results are written after every fault; results of faults that are not played
again are kept.

The fault is found by its text, not by its file: the snippet `find` must occur once in
the whole package, whichever way it is indented or broken into lines. A snippet that is
gone because the code was rewritten needs a new one that makes the same fault.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = "jkv"
# A test without output for so long hangs: a loop with a condition that never fails.
PATIENCE_SECONDS = 900.0


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A fault and the text that plants it."""

    name: str
    room: str  # the part of the package
    fault: str  # the fault in one sentence
    find: str  # occurs once in the package, up to white space
    replace: str


MUTATIONS = (
    # Rings, tables, requests, counters, blocks, prefix index.
    Mutation(
        "ring-wrap-off-by-one",
        "metadata",
        "The index right behind the end of a ring is not taken back to its beginning.",
        "jnp.where(index >= capacity, index - capacity, index)",
        "jnp.where(index > capacity, index - capacity, index)",
    ),
    Mutation(
        "counter-without-high-word",
        "metadata",
        "A counter that passes 32 bits begins again at zero: nothing is carried.",
        "carries = (old[:, 0] + increments < old[:, 0]).astype(jnp.uint32)",
        "carries = jnp.zeros_like(increments)",
    ),
    Mutation(
        "second-mention-accepted",
        "metadata",
        "An id named twice in one call counts as a first mention both times.",
        "gather(earliest, ids, fill=last) >= lane",
        "gather(earliest, ids, fill=last) >= 0",
    ),
    Mutation(
        "last-cause-reported",
        "metadata",
        "Of several causes of a refusal the last of the list is reported.",
        "for cause, applies in reversed(causes):",
        "for cause, applies in causes:",
    ),
    Mutation(
        "last-free-block-refused",
        "metadata",
        "A request that would take the very last free block is refused.",
        "is_over.append(taken > lack.free - keep)",
        "is_over.append(taken >= lack.free - keep)",
    ),
    Mutation(
        "block-returns-at-first-mention",
        "metadata",
        "A block given up by several owners in one call enters the ring at the turn of "
        "its first mention, not of its last.",
        "find_one(counts, zeroed, last=True)",
        "find_one(counts, zeroed, last=False)",
    ),
    Mutation(
        "holes-never-squeezed-out",
        "metadata",
        "Holes that revived blocks leave in the ring are not squeezed out when there "
        "are more of them than blocks.",
        "is_full = ring.span - ring.count > ring.indices.shape[0]",
        "is_full = jnp.bool_(False)",
    ),
    Mutation(
        "hit-by-hash-alone",
        "metadata",
        "A block whose hash is right is taken for a hit without comparing its tokens.",
        "same = jnp.all(theirs.tokens == prefixes.tokens, axis=-1)",
        "same = theirs.salts == theirs.salts",
    ),
    Mutation(
        "hit-in-another-salt",
        "metadata",
        "A block of another salt whose hash is right is taken for a hit.",
        "same &= theirs.salts == prefixes.salts",
        "same &= theirs.salts == theirs.salts",
    ),
    Mutation(
        "parents-not-confirmed",
        "metadata",
        "A hit need not have the hit of the column before as its parent.",
        "same &= theirs.parents == prefixes.parents",
        "same &= prefixes.parents >= 0",
    ),
    Mutation(
        "forgotten-child-found",
        "metadata",
        "A block that was forgotten, but is still listed under its parent, is found as "
        "a part.",
        "(gather(index.hashes, child, fill=0) != 0)",
        "(child < nothing)",
    ),
    Mutation(
        "moved-block-keeps-its-place",
        "metadata",
        "A place in a bucket is not free if its block was indexed anew somewhere else.",
        "(hashes == 0) | (keys != rows[..., None])",
        "hashes == 0",
    ),
    Mutation(
        "holes-handed-out",
        "metadata",
        "Blocks are taken from the head of the ring with the holes between them.",
        "is_dense = ring.span == ring.count",
        "is_dense = jnp.bool_(True)",
    ),
    # Classes of cached blocks.
    Mutation(
        "higher-classes-never-follow",
        "metadata",
        "Where the lowest class has too few blocks, others are handed out twice.",
        "lacking = jnp.clip(num - lowest.count, 0, each.count)",
        "lacking = jnp.clip(num - lowest.count, 0, 0)",
    ),
    Mutation(
        "a-class-of-an-earlier-life",
        "metadata",
        "A block that was handed out is still of the class of what it held.",
        "classes=scatter(kept.classes, ids, 0)",
        "classes=kept.classes",
    ),
    Mutation(
        "a-parent-below-its-child",
        "tiers",
        "What leads up to a restored block of a high class is handed out before it.",
        "classes[parent] = max(classes[parent], classes[node])",
        "pass",
    ),
    Mutation(
        "demoted-to-the-tail",
        "metadata",
        "What is lowered in class stands where it was in its ring, not by its age.",
        "entered - kept.num_entered - 1,  # the oldest has the smallest bits",
        "jnp.zeros_like(entered),",
    ),
    # Groups of layers.
    Mutation(
        "shut-out-in-one-group-alone",
        "metadata",
        "Who lacks a block in one group is not shut out by another group.",
        "any_of(wants) & any_of(is_over)",
        "any_of([want & over for want, over in zip(wants, is_over)])",
    ),
    Mutation(
        "partner-by-its-number-alone",
        "metadata",
        "A block is found beside another although it was handed out since.",
        "jnp.where(agrees, partner, nothing)",
        "partner",
    ),
    Mutation(
        "partners-of-an-earlier-life",
        "metadata",
        "What stood beside a block before it was handed out is found beside it again.",
        "partners = scatter(partners, leaders, nothing)",
        "partners = partners.at[:0].set(nothing)",
    ),
    Mutation(
        "leader-goes-on-alone",
        "metadata",
        "A prompt is found as far as one group has it, whatever the others lack.",
        "return blocks, functools.reduce(operator.and_, reaches)",
        "return blocks, reaches[metadata.leader]",
    ),
    Mutation(
        "part-in-one-group-alone",
        "metadata",
        "A part of a block is found although another group has no block beside it.",
        "is_child &= children[number] < metadata.groups[number].num_blocks",
        "is_child &= children[number] >= 0",
    ),
    Mutation(
        "windows-reserve-whole-sequences",
        "state",
        "Blocks that a window would give back are reserved as well.",
        "return jnp.minimum(total - num_found, most)",
        "return total - num_found",
    ),
    Mutation(
        "rewritten-beside-an-indexed-block",
        "metadata",
        "A block that a sequence writes again is still found beside the leader's.",
        "if number != metadata.leader: return forget_blocks(metadata, number, block)",
        "if number != metadata.leader:\n        return metadata",
    ),
    Mutation(
        "evicts-for-one-group",
        "verbs",
        "Eviction ends as soon as any one group has enough free blocks.",
        "requests.any_of([num < num_blocks for num in counts])",
        "~requests.any_of([num >= num_blocks for num in counts])",
    ),
    # The verbs, from allocate to resize, and the look-ups.
    Mutation(
        "commit-of-another-epoch",
        "verbs",
        "A step is committed although its sequence was cut back or replaced since.",
        "& (rows.epoch == batch.epochs)",
        "& (batch.epochs >= 0)",
    ),
    Mutation(
        "commit-loses-a-reference",
        "verbs",
        "An equal block that takes the place of the own one gets no reference for it.",
        "scatter_add(counts, jnp.concatenate([gains, own]), jnp.asarray(signs))",
        "scatter_add(counts, own, -1)",
    ),
    Mutation(
        "commit-without-all-tokens",
        "verbs",
        "A block becomes visible although some of its tokens were never told.",
        "lanes.valid & jnp.all(columns.prefixes.tokens >= 0, axis=1)",
        "lanes.valid & jnp.any(columns.prefixes.tokens >= 0, axis=1)",
    ),
    Mutation(
        "tail-of-one-token-not-copied",
        "verbs",
        "A fork does not copy a last block that holds a single token.",
        "copied = done.served & (length.tail > 0)",
        "copied = done.served & (length.tail > 1)",
    ),
    Mutation(
        "truncate-keeps-the-shared-tail",
        "verbs",
        "A sequence cut back into a shared block gets a copy, but its reference to the "
        "shared block is never given back.",
        "kept - copied.astype(jnp.int32)",
        "kept",
    ),
    Mutation(
        "truncate-writes-to-an-indexed-tail",
        "verbs",
        "A sequence cut back into a block that the prefix index can find overwrites "
        "it, and the index goes on finding it.",
        "rewritten = done.served & self.is_cut & ~copied",
        "rewritten = jnp.zeros_like(done.served)",
    ),
    Mutation(
        "append-refuses-the-last-token",
        "verbs",
        "The token that fills the longest context is refused.",
        "num_tokens > metadata.max_context_length - length",
        "num_tokens >= metadata.max_context_length - length",
    ),
    Mutation(
        "revived-blocks-counted-as-free",
        "verbs",
        "Cached blocks that a prompt revives are promised to later requests as well.",
        "Demand.of(group, fresh + revivals.costs, wants)",
        "Demand.of(group, fresh, wants)",
    ),
    Mutation(
        "reorder-gives-up-its-own-past",
        "verbs",
        "A sequence that is its own parent is moved like any other and loses its "
        "reservation.",
        "changes = live & ~padding & (seq_ids != parents)",
        "changes = live & ~padding",
    ),
    Mutation(
        "shared-chunk-past-a-lane",
        "attention",
        "A chunk of shared blocks goes on where the table of a lane has other blocks.",
        "jnp.minimum(jnp.min(jnp.where(is_along, tile.reach, _ALL)), column + width)",
        "jnp.minimum(jnp.max(tile.reach), column + width)",
    ),
    Mutation(
        "write-to-a-negative-layer",
        "attention",
        "A traced layer of -1 is written to, as the last one.",
        "jnp.where(valid & (write.layer >= 0), write.block_ids, past_end)",
        "jnp.where(valid, write.block_ids, past_end)",
    ),
    Mutation(
        "age-without-the-opening",
        "verbs",
        "Of sequences used in the same call the lower id counts as older, whichever "
        "was opened first.",
        "seq_ids, age], num_keys=4",
        "seq_ids, age], num_keys=2",
    ),
    Mutation(
        "compact-leaves-the-parents",
        "verbs",
        "Renumbering blocks leaves the old ids of their parents in the prefix index.",
        "parents=renamed(moved(index.parents, num_old))",
        "parents=moved(index.parents, num_old)",
    ),
    Mutation(
        "resize-drops-cached-blocks-first",
        "verbs",
        "A shrinking pool lets go of cached blocks before empty ones.",
        'np.argsort(known[free], kind="stable")',
        'np.argsort(~known[free], kind="stable")',
    ),
    Mutation(
        "slot-of-a-negative-position",
        "verbs",
        "A position of -1 has a slot: the first column of the sequence's table.",
        "column = jnp.where(positions < 0, group.max_blocks_per_sequence, column)",
        "column = jnp.maximum(column, 0)",
    ),
    # Quantized rows, copies of tails, contents on the host, swapping, files.
    Mutation(
        "scales-left-behind",
        "storage",
        "Copying a tail copies the elements of one byte and not their scales.",
        "lambda _, arrays: jax.tree.map(copy, arrays)",
        "lambda _, kept: {n: copy(a) if a.ndim > 4 else a for n, a in kept.items()}",
    ),
    Mutation(
        "tokens-of-a-tail-left-behind",
        "storage",
        "Copying a tail does not copy the tokens recorded for it.",
        "tokens = scatter(group.tokens, copies.target, rows)",
        "tokens = scatter(group.tokens, copies.target, rows * 0 - 1)",
    ),
    Mutation(
        "scale-rounded-down",
        "storage",
        "Scales are cut off to bfloat16 instead of rounded up, so the largest element "
        "leaves the range.",
        "bits = (bits + jnp.uint32(0xFFFF)) >> jnp.uint32(16)",
        "bits = bits >> jnp.uint32(16)",
    ),
    Mutation(
        "tokens-of-the-first-piece",
        "storage",
        "Every piece of swapped blocks brings the recorded tokens of the first ones.",
        "crossed, rows[piece], sharding",
        "crossed, rows[: piece.stop - piece.start], sharding",
    ),
    Mutation(
        "swapped-sequence-forgets-its-gap",
        "storage",
        "A sequence whose chain had a gap may make blocks visible again once it was "
        "swapped out and in.",
        "np.where(visible != 0, np.int32(-1), np.int32(0))",
        "np.where(visible > 0, np.int32(-1), np.int32(0))",
    ),
    # check, stats, memory profile, fragmentation.
    Mutation(
        "check-overlooks-a-shared-tail",
        "inspection",
        "check does not look at the owners of a partly filled last block.",
        "max(int(self.lengths[row]), 0) // self.group.block_size",
        "-(-max(int(self.lengths[row]), 0) // self.group.block_size)",
    ),
    Mutation(
        "check-overlooks-another-salt",
        "inspection",
        "check does not notice that a block and its parent have different salts.",
        "parent != nothing and salts[parent] != salts[block]",
        "parent != nothing and salts[block] != salts[block]",
    ),
    Mutation(
        "check-overlooks-the-order-of-eviction",
        "inspection",
        "check does not notice that a free block will be handed out before its child.",
        "if live[block] or turn[block] > turn[parents[block]]:",
        "if live[block]:",
    ),
    Mutation(
        "frees-counted-per-owner",
        "inspection",
        "The statistics take a block off the freed ones for each of its owners.",
        "frees=sums.num_taken - sums.live_blocks",
        "frees=sums.num_taken - sums.mapped_blocks",
    ),
    Mutation(
        "sum-of-lengths-without-carry",
        "inspection",
        "A sum of context lengths that passes 32 bits begins again at zero.",
        "a[1] + b[1] + (total < a[0]).astype(jnp.uint32)",
        "a[1] + b[1]",
    ),
    # Sizes, layout, presets, a model's config.json.
    Mutation(
        "storage-bytes-without-scales",
        "config",
        "The bytes of the storage leave out the scales of elements of one byte.",
        "count_bytes(self.sizes.lay_out_storage().values())",
        'count_bytes([self.sizes.lay_out_storage()[n] for n in ("key_pool", '
        '"value_pool")])',
    ),
    Mutation(
        "most-sequences-rounded-down",
        "config",
        "A sequence's last, partly filled block is not counted when the most sequences "
        "are asked for.",
        "max(-(-context_length // self.block_size), 1)",
        "max(context_length // self.block_size, 1)",
    ),
    Mutation(
        "presets-in-binary-gigabytes",
        "config",
        "The presets fill gibibytes, and so more than the gigabytes that they promise.",
        'cls.for_memory("4GB", **suited | sizes)',
        'cls.for_memory("4GiB", **suited | sizes)',
    ),
    Mutation(
        "largest-pool-without-the-holes",
        "config",
        "A pool with a prefix index may be so large that sums of indices of its ring "
        "overflow.",
        "if prefix_caching and num_blocks > MAX_COUNT // 2:",
        "if prefix_caching and num_blocks > MAX_COUNT:",
    ),
    Mutation(
        "shared-layers-counted",
        "config",
        "Layers of a model that use the keys and values of others are stored too.",
        "return total - int(shared)",
        "return total",
    ),
    # Attention without a kernel: decoding, prefill, gradients.
    Mutation(
        "decode-window-off-by-one",
        "attention/xla",
        "A row of a decode step sees one token less of its window.",
        "visible &= tokens >= context - window",
        "visible &= tokens > context - window",
    ),
    Mutation(
        "decode-multiplies-stale-values",
        "attention/xla",
        "Values that a decode row does not see are weighted with zero, but not masked: "
        "a NaN among them spreads.",
        "values = jnp.where(seen[:, None, :, None], gathered.values, 0.0)",
        "values = gathered.values + 0.0",
    ),
    Mutation(
        "prefill-window-off-by-one",
        "attention/xla",
        "A row of a prefill sees one token more than its window.",
        "before = call.find_held(position - call.window)\n"
        "        if call.past is not None:\n"
        "            last, before = call.past.limit(request, last, before)\n"
        "        return Readers(request, jnp.where(valid, last, -1), before)",
        "before = call.find_held(position - call.window - 1)\n"
        "        return Readers(request, jnp.where(valid, last, -1), before)",
    ),
    Mutation(
        "prefill-ignores-sinks",
        "attention/xla",
        "Rows of a prefill have no sink.",
        "sums = empty_sums(shape, call.pools.value_dim, sinks)",
        "sums = empty_sums(shape, call.pools.value_dim, None)",
    ),
    Mutation(
        "prefill-loses-the-last-token",
        "attention/xla",
        "A row of a prefill does not see its own token.",
        "Readers(request, jnp.where(valid, last, -1), before)",
        "Readers(request, jnp.where(valid, last - 1, -1), before)",
    ),
    Mutation(
        "gradient-ignores-the-soft-cap",
        "attention/xla",
        "Going backwards, the cap of the scores has a slope of one.",
        "d_scores *= 1.0 - jnp.square(scores / soft_cap)",
        "d_scores *= jnp.ones_like(scores)",
    ),
    Mutation(
        "gradient-lets-foreign-rows-in",
        "attention/xla",
        "A broken cotangent of a row that nobody owns reaches all keys and values.",
        "d_scores = jnp.where(seen, d_scores, 0.0)",
        "d_scores = jnp.where(True, d_scores, 0.0)",
    ),
    Mutation(
        "decode-joins-broken-lanes",
        "attention/xla",
        "One text's NaN is added with a weight of 0 to all texts of a trip.",
        "lane_values = jnp.where(is_sound, lane_values, 0.0)",
        "lane_values = jnp.where(True, lane_values, 0.0)",
    ),
    Mutation(
        "broken-values-reach-earlier-rows",
        "attention/xla",
        "Rows of a chunk add up with weight 0 a broken value that they do not see.",
        "return jnp.where(is_sound & used, tokens, 0.0), marks",
        "return jnp.where(used, tokens, 0.0), marks",
    ),
    Mutation(
        "broken-values-are-dropped",
        "attention/xla",
        "A row that sees a broken value goes on without it.",
        "marks = jnp.where(is_sound.all(axis=-1), 0.0, jnp.nan)",
        "marks = jnp.where(is_sound.all(axis=-1), 0.0, 0.0)",
    ),
    Mutation(
        "gradient-of-the-log-sum-exp-lost",
        "attention",
        "What depends on the log-sum-exp has no gradient.",
        "delta -= d_lse",
        "delta -= 0 * d_lse",
    ),
    # Kernels written for Triton: their modules.
    Mutation(
        "triton-forgets-signs",
        "attention/kernel",
        "Numbers without a sign are compared and divided as if they had one.",
        "return compute(w, name, x, y, signed=_is_signed(equation))",
        "return compute(w, name, x, y)",
    ),
    Mutation(
        "triton-counts-anything",
        "attention/kernel",
        "A loop over floats, or numbers without a sign, becomes one over integers.",
        'if count.aval.dtype.kind != "i": return None',
        "pass",
    ),
    Mutation(
        "triton-drops-what-a-mesh-leaves",
        "attention/kernel",
        "Kernels whose arrays lie on a mesh have a primitive that has no rule.",
        '"reshard": _pass, ',
        "",
    ),
    Mutation(
        "triton-narrow-addresses",
        "attention/kernel",
        "Addresses of arrays above 4 GiB are 32 bits wide.",
        'Type("i64" if ref.num_bytes > 2**32 else "i32", shape)',
        'Type("i32", shape)',
    ),
    # The attention kernel: lists of work, body, joining, tuning, elements.
    Mutation(
        "kernel-position-shifted",
        "attention/kernel",
        "Rows of a prefill stand one token further than they do.",
        "position = work.position[entry]",
        "position = work.position[entry] + 1",
    ),
    Mutation(
        "kernel-unmasked-tiles-too-many",
        "attention/kernel",
        "The tile that only some rows see as a whole goes without a mask.",
        "seen_by_all = jnp.clip(find_last(o, position, variant) + 1, 0,",
        "seen_by_all = jnp.clip(find_last(o, position, variant) + tile_tokens, 0,",
    ),
    Mutation(
        "kernel-stores-rows-of-nobody",
        "attention/kernel",
        "Rows of padding are stored where their slots seem to be.",
        "is_stored = o.valid[row] != 0",
        "is_stored = o.valid[row] >= 0",
    ),
    Mutation(
        "kernel-stores-in-another-part",
        "attention/kernel",
        "Each part of a block stores as if it were the first.",
        "offset -= o.part[0] * block_size",
        "offset -= 0 * o.part[0]",
    ),
    Mutation(
        "kernel-stores-keys-as-values",
        "attention",
        "Values that lie behind the keys are stored as the keys are.",
        "bits = [rows[row, head, section.columns[0]] for section in sections]",
        'bits = [o.rows["key_pool"][row, head, each.columns[0]] for each in sections]',
    ),
    Mutation(
        "kernel-window-off-by-one",
        "attention/kernel",
        "A decode row sees one token less of its window.",
        "visible &= token >= self.tokens.first",
        "visible &= token > self.tokens.first",
    ),
    Mutation(
        "kernel-reads-before-the-window",
        "attention/kernel",
        "Tokens before the window are read, although their scores are masked.",
        "token = jnp.clip(start + offsets, tokens.first, last)",
        "token = jnp.clip(start + offsets, 0, last)",
    ),
    Mutation(
        "kernel-joins-the-last-piece-twice",
        "attention/kernel",
        "The partial result of a row's last piece is joined a second time.",
        "is_mine = piece < end",
        "is_mine = piece <= end",
    ),
    Mutation(
        "kernel-lanes-leave-late",
        "attention/kernel",
        "A lane goes along to the end of a unit in which its table leaves the others'.",
        "common = lax.div(shared.common * block_size, jnp.int32(unit))",
        "common = lax.div(shared.common * block_size + unit - 1, jnp.int32(unit))",
    ),
    Mutation(
        "kernel-lanes-store-before",
        "attention/kernel",
        "What lanes share takes the places of what more of them share before it.",
        "number = (ends - totals)[request] + (before[stretch] + index)[:, None]",
        "number = (ends - totals)[request] + (0 * before[stretch] + index)[:, None]",
    ),
    Mutation(
        "kernel-hides-broken-numbers",
        "attention/kernel",
        "A piece whose sums are NaN counts as one that sees nothing.",
        "is_seen = lse != HIDDEN",
        "is_seen = lse > HIDDEN",
    ),
    Mutation(
        "kernel-spreads-broken-values",
        "attention/kernel",
        "Rows of a tile are NaN for values that only others of them see.",
        "times = jnp.max(is_nan.astype(jnp.int32)) *",
        "times = jnp.max(0 * is_nan.astype(jnp.int32)) *",
    ),
    Mutation(
        "kernel-scaled-weights-in-float16",
        "attention/kernel",
        "Weights times scales are rounded to float16, for which they are too small.",
        "if is_scaled and dtype == jnp.float16 else dtype",
        "if is_scaled and dtype == jnp.int8 else dtype",
    ),
    # Generation, sampling, progress.
    Mutation(
        "oldest-sequence-makes-room",
        "decoding",
        "When blocks lack, the oldest sequence is preempted and not the youngest.",
        "is_youngest = places.ages == places.num_running - 1",
        "is_youngest = places.ages == 0",
    ),
    Mutation(
        "samples-keep-a-token-of-their-parent",
        "decoding",
        "Samples fork one token more than the prompt from a running one.",
        "fork(cache, parents, prompt_lengths)",
        "fork(cache, parents, prompt_lengths + 1)",
    ),
    Mutation(
        "top-k-off-by-one",
        "decoding",
        "One token more than asked for is kept by top-k.",
        "dtype=weights.dtype) < limits",
        "dtype=weights.dtype) <= limits",
    ),
    Mutation(
        "penalty-favours-unlikely-tokens",
        "decoding",
        "The repetition penalty divides negative logits too, which makes them larger.",
        "jnp.where(logits < 0, logits * penalty, logits / penalty)",
        "logits / penalty",
    ),
    Mutation(
        "draws-repeat-themselves",
        "decoding",
        "A sequence draws with the same random numbers at every step.",
        '"threefry2x32"), count)',
        '"threefry2x32"), count * 0)',
    ),
    Mutation(
        "padding-marks-a-token-as-seen",
        "decoding",
        "The padding behind a prompt counts as the last token of the vocabulary.",
        "token = jnp.where(tokens < 0, state.seen.shape[1], tokens)",
        "token = tokens",
    ),
    # The engine.
    Mutation(
        "cancelled-on-the-host-alone",
        "serving",
        "Sequences that the host ends are computed to their end.",
        "self._cancelled[sample.sequence] |= is_computed",
        "self._cancelled[sample.sequence] |= False",
    ),
    Mutation(
        "a-window-is-read-for-those-who-came-later",
        "serving",
        "A window's tokens go to the request that has the prompt when it is read.",
        "if (sample := window.samples[part.sequence]) is not None",
        "if (sample := self.queue.find_computed()[part.sequence]) is not None",
    ),
    Mutation(
        "a-failed-window-is-read-again",
        "serving",
        "The window before a failed step is read after it.",
        "self._unread = None computed =",
        "computed =",
    ),
    Mutation(
        "priorities-end-on-the-host",
        "serving",
        "On the device requests run as they came.",
        "jnp.argsort(jnp.where(waits, gather(ranks, sequences), last), stable=True)",
        "jnp.argsort(jnp.where(waits, 0, last), stable=True)",
    ),
    Mutation(
        "all-samples-of-a-group-run",
        "serving",
        "A request with fewer samples than a group computes the others, too.",
        "is_wanted = sample_index < wanted[:, None]",
        "is_wanted = sample_index < wanted[:, None] + 9",
    ),
    Mutation(
        "padding-arrives-as-the-last-prompt",
        "serving",
        "Lanes without a request overwrite the sampling of the last prompt.",
        "first = jnp.where(indices < 0, past_the_end, indices * samples)",
        "first = indices * samples",
    ),
    Mutation(
        "stop-strings-leave-a-token",
        "serving",
        "A token too many is kept where a text has its stop string.",
        "news.tokens[:num_new], news.logprobs[:num_new]",
        "news.tokens[: num_new + 1], news.logprobs[:num_new]",
    ),
    Mutation(
        "half-a-stop-string-is-shown",
        "serving",
        "What may begin a stop string is shown at once.",
        "held = 0 if has_ended else self._count_held()",
        "held = 0",
    ),
    Mutation(
        "a-consumer-leaves-unnoticed",
        "serving",
        "Who closes a stream leaves its request running.",
        "return read_events(self._runner, state, self._scheduler.cancel)",
        "return read_events(self._runner, state, lambda request: None)",
    ),
    Mutation(
        "results-are-kept-for-ever",
        "serving",
        "Results are forgotten by their number, but never by their time.",
        "next(iter(entries.values()))[0] <= now",
        "next(iter(entries.values()))[0] <= -1",
    ),
    Mutation(
        "deadlines-of-those-that-run-alone",
        "serving",
        "A request that waits has no deadline.",
        "self._end_all(state, FinishReason.DEADLINE)",
        "state.first_token and self._end_all(state, FinishReason.DEADLINE)",
    ),
    # The doctor and the plan.
    Mutation(
        "doctor-takes-nan-for-right",
        "commands",
        "The doctor does not report attention that comes out as NaN.",
        "if not error <= TOLERANCES[dtype]:",
        "if error > TOLERANCES[dtype]:",
    ),
    Mutation(
        "doctor-overlooks-a-hidden-card",
        "commands",
        "The doctor says nothing of a driver that JAX does not use.",
        'if facts["drivers"] and not on_gpu:',
        'if facts["drivers"] and on_gpu:',
    ),
    Mutation(
        "first-light-names-a-flag-that-does-not-help",
        "commands",
        "Loops that are wrong with and without command buffers are said to need none.",
        'packed.verdict == "FAILED" and single.verdict == "ok"',
        'packed.verdict == "FAILED"',
    ),
    Mutation(
        "flags-of-another-plugin-are-set",
        "commands",
        "What was found with one plugin is said of another.",
        'if not flags or kept["versions"] != find_plugins():',
        "if not flags:",
    ),
    Mutation(
        "plan-takes-all-weights-off-each-device",
        "commands",
        "Several devices that share a model each keep all of its weights.",
        "- -(-weights // num_devices)",
        "- weights",
    ),
    Mutation(
        "plan-says-one-devices-bytes",
        "commands",
        "The bytes of a token on all devices are those on one of them.",
        "bytes_per_token=whole.bytes_per_token",
        "bytes_per_token=config.bytes_per_token",
    ),
    Mutation(
        "state-not-forked",
        "storage",
        "A fork begins with whatever its row held, not with its parent's state.",
        "if moves.source is not None:\n        arrays = _copy_rows(",
        "if moves.source is not None and moves.is_exchange:\n"
        "        arrays = _copy_rows(",
    ),
    Mutation(
        "state-of-a-fresh-row-not-zero",
        "verbs",
        "A sequence without tokens begins with the state that its row held before.",
        "found = read_rows(rows, layer, row, base == 0)",
        "found = read_rows(rows, layer, row, base < 0)",
    ),
    Mutation(
        "hit-without-a-snapshot",
        "metadata",
        "A prompt is found up to where its blocks are, whether a state stands there.",
        "return length // metadata.block_size, jnp.where(length > 0, best, none)",
        "whole = jnp.max(jnp.where(goes_on, jnp.arange(num_columns)[None] + 1, 0), 1)\n"
        "    return whole.astype(jnp.int32), jnp.where(length > 0, best, none)",
    ),
    Mutation(
        "snapshot-of-a-forgotten-sequence-found",
        "metadata",
        "A salt that was invalidated keeps its snapshots.",
        "salt is None or known.salts == salt",
        "salt is None or known.salts != known.salts",
    ),
    Mutation(
        "snapshot-by-hash-alone",
        "metadata",
        "The hash of a text proves that a snapshot is of it.",
        "return jnp.any((theirs != tokens) & (position < length[:, None]), axis=1)",
        "return jnp.any((theirs != tokens) & (position < 0), axis=1)",
    ),
    Mutation(
        "newest-snapshot-given-up",
        "metadata",
        "The snapshot that was used last gives way to a new one.",
        "oldest = jnp.argmin(snapshots.last_used)",
        "oldest = jnp.argmax(snapshots.last_used)",
    ),
    Mutation(
        "cut-to-where-no-state-is",
        "metadata",
        "A sequence may be cut to any length, whether its state stands there or not.",
        "return _Cut(~(stands | is_there), pending, found)",
        "return _Cut(lengths < 0, pending, found)",
    ),
    Mutation(
        "refused-request-advances-its-state",
        "verbs",
        "write_state stores the state of a request that got no rows.",
        "grows, no_row = batch.query_lengths > 0, storage.bases.shape[1]",
        "grows, no_row = batch.seq_ids >= 0, storage.bases.shape[1]",
    ),
    Mutation(
        "states-of-a-file-need-snapshots",
        "storage",
        "Arrays of snapshots are asked for where a cache has none.",
        "if path in shapes and axis is not None else 0",
        "if axis is not None else 0",
    ),
    Mutation(
        "axes-in-the-order-of-a-file",
        "state",
        "The axis that a mesh divides is looked up by place, not by name.",
        "dict(zip(sorted(self.rows), self.row_axes, strict=True)),",
        "dict(zip(self.rows, self.row_axes, strict=True)),",
    ),
    Mutation(
        "pending-inputs-not-moved-up",
        "verbs",
        "Tokens that stay pending keep the inputs of those that were pending first.",
        "earlier = jnp.minimum(place + skipped[:, None], most - 1)",
        "earlier = jnp.minimum(place + 0 * skipped[:, None], most - 1)",
    ),
    Mutation(
        "held-prompt-is-taken-over",
        "decoding",
        "The first of the samples that wait takes the held prompt from the others.",
        "may_take = ~gather(has_more_samples(state, active), lanes.prompts)",
        "may_take = jnp.ones_like(lanes.forks)",
    ),
    # Pruning.
    Mutation(
        "pruned-sequence-commits",
        "verbs",
        "A pruned sequence commits its blocks under tokens that do not determine them.",
        "return metadata.index.enter(metadata, row, salts, jnp.full_like(row, -1))",
        "return metadata.index.cut(metadata, row, gather("
        "metadata.context_lengths, row))",
    ),
    Mutation(
        "overwrite-in-a-shared-block",
        "blocks",
        "Rows are overwritten in blocks that other sequences have, too.",
        "is_full = stays = ~selection.rewritten",
        "stays = ~selection.rewritten",
    ),
    Mutation(
        "scrub-zeroes-cached-blocks",
        "verbs",
        "Cached blocks are zeroed, and found all the same.",
        "num_named = jnp.where(is_known, size, num_named)",
        "num_named = jnp.where(is_known, num_named, num_named)",
    ),
    Mutation(
        "cached-block-moves-from-its-parent",
        "blocks",
        "A cached block that moves stays in the index, and outlives its parent.",
        "is_bound = is_known & ~intact",
        "is_bound = jnp.zeros_like(is_known)",
    ),
    Mutation(
        "shared-tail-moves",
        "blocks",
        "A shared block that becomes a partly filled tail is moved, not copied.",
        "is_moved = is_whole & (is_own | (is_full & ~is_bound))",
        "is_moved = is_whole & (is_own | ~is_bound)",
    ),
    Mutation(
        "copies-to-the-column-itself",
        "blocks",
        "A copied column takes the old block of its own column, moved or not.",
        "column = jnp.take_along_axis(listed, jnp.maximum(nth, 0), axis=1)",
        "column = jnp.broadcast_to(\n"
        "        jnp.arange(nth.shape[1], dtype=jnp.int32), nth.shape)",
    ),
    Mutation(
        "positions-are-slots",
        "verbs",
        "The positions of a batch start again at the slots after a prune.",
        "positions += dropped",
        "positions += 0 * dropped",
    ),
    Mutation(
        "fork-forgets-dropped-tokens",
        "metadata",
        "A child of a pruned sequence has its slots as positions.",
        "num_dropped = self.length.positions - self.length.tokens",
        "num_dropped = jnp.zeros_like(self.length.tokens)",
    ),
    Mutation(
        "copies-in-descending-order",
        "blocks",
        "Copies run from the last column to the first, over rows still to be read.",
        "lambda i, arrays: copy(layer, i * width, arrays),",
        "lambda i, arrays: copy(layer, (num_trips - 1 - i) * width, arrays),",
    ),
    Mutation(
        "window-copies-ascend",
        "blocks",
        "A window's rows are copied in ascending order where released columns forbid.",
        "descends = _overtakes(moves, jnp.where(is_fresh, -1, column))",
        "descends = None",
    ),
    # Logits processors.
    Mutation(
        "processor-state-not-advanced",
        "decoding",
        "A logits processor does not receive the tokens of plain steps.",
        "logprobs = mark_refused(logits, tokens, logprobs) "
        "processor = processor.advance(tokens)",
        "logprobs = mark_refused(logits, tokens, logprobs)",
    ),
    Mutation(
        "processed-by-another-row",
        "decoding",
        "A sequence is processed with the state of another sequence of the step.",
        "return whole.pick(sequences)",
        "return whole.pick(jnp.flip(sequences))",
    ),
    Mutation(
        "processor-refusal-lost-among-guesses",
        "decoding",
        "A step with guesses takes a token of a text that is allowed none.",
        "            logprobs = mark_refused(logits, tokens, logprobs)\n"
        "        return _Chosen",
        "            pass\n        return _Chosen",
    ),
    Mutation(
        "processor-end-ignored",
        "decoding",
        "A sequence ended by its logits processor continues.",
        "ended = new.processor and new.processor.has_ended()",
        "ended = None",
    ),
    Mutation(
        "guess-processed-one-token-late",
        "decoding",
        "A draft token is processed with the state before it, not after it.",
        "row_of = rows.places * (drafted.shape[1] + 1) + rows.before",
        "row_of = rows.places * (drafted.shape[1] + 1) + jnp.maximum("
        "rows.before - 1, 0)",
    ),
    Mutation(
        "processor-state-of-the-next-guess",
        "decoding",
        "A text keeps the state after the first wrong guess, not the one before it.",
        "is_last = (after == last[:, None]).reshape(-1)",
        "is_last = (after == jnp.minimum(last + 1, tokens.shape[1] - 1)[:, None])"
        ".reshape(-1)",
    ),
    Mutation(
        "logprob-of-unprocessed-logits",
        "decoding",
        "A log-probability is of the model's logits, not of the processed ones.",
        "tokens, logprobs = choice.sample(logits, chosen, positions, seen)",
        "model = logits if processor is None else jnp.where(\n"
        "        jnp.isinf(logits), 0, logits)\n"
        "    tokens, _ = choice.sample(logits, chosen, positions, seen)\n"
        "    logprobs = jnp.take_along_axis(\n"
        "        jax.nn.log_softmax(model), tokens[:, None], axis=1)[:, 0]",
    ),
    Mutation(
        "beam-without-its-parents-state",
        "decoding",
        "A beam goes on with the state of its row, not with that of its parent.",
        "processor = searcher.rows_of(state, running.parents)",
        "processor = searcher.rows_of(\n"
        "    state, jnp.indices(running.parents.shape, jnp.int32)[1])",
    ),
    Mutation(
        "span-end-hides-the-row",
        "masks",
        "An end before its row hides the row itself.",
        "jnp.maximum(low, 0), jnp.maximum(self.ends, rank)",
        "jnp.maximum(low, 0), self.ends",
    ),
    Mutation(
        "span-ends-past-the-request",
        "masks",
        "A span may reach the rows of the next request.",
        "is_wrong = (high >= rows.length) | (low > rank) | (high - rank >= max_span)",
        "is_wrong = (low > rank) | (high - rank >= max_span)",
    ),
    Mutation(
        "tree-of-near-ancestors",
        "masks",
        "A row sees no ancestors past the fourth.",
        "for _ in range(max(1, (max_span - 1).bit_length())):",
        "for _ in range(2):",
    ),
    Mutation(
        "spans-in-the-prefix-index",
        "verbs",
        "Keys that depend on later rows are found by prompts with other rows.",
        "lengths = jnp.where(mask.is_private, 0, batch.query_lengths)",
        "lengths = batch.query_lengths",
    ),
    Mutation(
        "sinks-counted-twice",
        "verbs",
        "A sink counts in the cached part and in the join.",
        "found = attend(requests, window=window, sinks=sinks, plans=plans)\n"
        "        sinks = None",
        "found = attend(requests, window=window, sinks=sinks, plans=plans)",
    ),
    Mutation(
        "nan-of-a-value-in-the-step",
        "attention",
        "A NaN among the values of the step's rows reaches no row.",
        "scores += (marks + value_marks).T[None, :, None]",
        "scores += marks.T[None, :, None]",
    ),
    Mutation(
        "rows-moved-under-a-fork",
        "verbs",
        "Rows of a tree are moved in blocks that a fork shares.",
        "is_wrong |= moves & is_shared.any(axis=1)",
        "is_wrong |= moves & is_shared.all(axis=1)",
    ),
    Mutation(
        "rows-past-a-span-in-the-chunk",
        "decoding",
        "A row's span is counted from the prompt, not from the chunk.",
        "jnp.where(ends >= 0, ends - done, -1), cacheable",
        "jnp.where(ends >= 0, ends - done // 2, -1), cacheable",
    ),
    Mutation(
        "private-span-finds-causal-keys",
        "decoding",
        "A prompt with spans hits blocks of the same tokens without spans.",
        "sequences = state.prompts.spans.cut_before(sequences, lanes.prompts)",
        "pass",
    ),
    Mutation(
        "variant-lost-in-added-prompts",
        "decoding",
        "Added prompts all use the first variant.",
        "added = with_variants(added, logits_processor)",
        "added = with_variants(\n"
        "        dataclasses.replace(added, variants=None), logits_processor\n"
        "    )",
    ),
    Mutation(
        "thoughts-of-the-prompt-not-counted",
        "logits_processors",
        "A thought that begins in the prompt has the whole budget behind the prompt.",
        "num_thoughts=jnp.where(is_thinking, behind, 0)",
        "num_thoughts=jnp.zeros_like(behind)",
    ),
    Mutation(
        "row-without-a-token-moves",
        "logits_processors",
        "The newest tokens of a text move on when it has none.",
        "return jnp.where(tokens[:, None] < 0, newest, pushed)",
        "return pushed",
    ),
    # Drafters of published checkpoints.
    Mutation(
        "head-on-its-own-hidden-state",
        "drafters",
        "Stored keys of a head come from the row's own hidden state, not the last.",
        "before = find_previous(batch, self._project(hidden), self._project(previous))",
        "before = self._project(hidden)",
    ),
    Mutation(
        "block-skips-the-newest-row",
        "drafters",
        "A block that drafts from the newest token on begins a row late, as DFlash.",
        "first = 0 if self.from_newest else 1",
        "first = 1",
    ),
)


def main() -> int:
    """Run the faults selected on the command line; return the exit status."""
    options = parse_arguments()
    # A termination from outside must restore the file as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    known = {mutation.name: mutation for mutation in MUTATIONS}
    if unknown := set(options.only) - known.keys():
        sys.exit(f"there is no fault {', '.join(sorted(unknown))}")
    chosen = [known[name] for name in options.only] or list(MUTATIONS)
    lost = [mutation for mutation in chosen if len(places(mutation)) != 1]
    for mutation in lost:
        print(f"{mutation.name}: found {len(places(mutation))} times", flush=True)
    if options.check:
        print(f"{len(chosen) - len(lost)} of {len(chosen)} snippets are found once")
        return int(bool(lost))

    first_tests: dict[str, list[str]] = {}
    if options.first_tests is not None:
        first_tests = json.loads(options.first_tests.read_text())
    results = kept_results(options.output)
    num_survivors = 0
    for number, mutation in enumerate(chosen, 1):
        began = time.monotonic()
        if mutation in lost:
            found: dict[str, Any] = {"caught_by": None, "note": "not played: no place"}
        else:
            with played(mutation):
                likely = first_tests.get(mutation.name, [])
                found = judge(likely, options.tests, options.patience)
        seconds = round(time.monotonic() - began, 1)
        results[mutation.name] = {
            "fault": mutation.fault,
            "room": mutation.room,
            **found,
            "seconds": seconds,
        }
        num_survivors += found["caught_by"] is None
        verdict = found["caught_by"] or "NOT CAUGHT"
        note = f" ({found['note']})" if "note" in found else ""
        print(
            f"{seconds:6.0f} s  {mutation.name}: {verdict}{note}; "
            f"{len(chosen) - number} remain",
            flush=True,
        )
        if options.output is not None:
            write_results(options.output, results)
    print(f"{len(chosen) - num_survivors} of {len(chosen)} faults were caught")
    return int(num_survivors > 0)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python tests/support/mutations.py", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--check", action="store_true", help="play nothing")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument(
        "--tests", nargs="+", default=[], metavar="PATH", help="default: all"
    )
    parser.add_argument(
        "--first-tests", type=pathlib.Path, metavar="FILE", help="JSON of name: paths"
    )
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_SECONDS,
        metavar="SECONDS",
        help="a test that takes longer hangs (default: %(default)s)",
    )
    return parser.parse_args()


def places(mutation: Mutation) -> list[tuple[pathlib.Path, tuple[int, int]]]:
    """Return the occurrences of the snippet: files, and spans of their text."""
    words = map(re.escape, mutation.find.split())
    pattern = re.compile(r"\s+".join(words))
    return [
        (path, match.span())
        for path in sorted((ROOT / PACKAGE).rglob("*.py"))
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    ]


@contextlib.contextmanager
def played(mutation: Mutation) -> Iterator[None]:
    """Plant the fault, and remove it again in any case."""
    ((path, (start, stop)),) = places(mutation)
    before = path.read_bytes()
    text = before.decode("utf-8")
    try:
        changed = text[:start] + mutation.replace + text[stop:]
        compile(changed, path.name, "exec")
        path.write_bytes(changed.encode("utf-8"))
        yield
    finally:
        path.write_bytes(before)


def judge(likely: list[str], tests: list[str], patience: float) -> dict[str, Any]:
    """Run all likely tests, then others of `make test`; return the first failure."""
    if likely:
        found = run_tests(likely, patience, all_cases=True)
        if found["caught_by"] is not None:
            return found
    # The likely tests have already run.
    others = [f"--deselect={path}" for path in likely]
    return run_tests([*tests, *others], patience)


def run_tests(
    arguments: list[str], patience: float, all_cases: bool = False
) -> dict[str, Any]:
    """Run pytest up to the first failure; return the failed test."""
    command = [sys.executable, "-m", "pytest", "-x", "-v", "-p", "no:cacheprovider"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        # Two versions of a file written in the same second would share bytecode.
        "PYTHONDONTWRITEBYTECODE": "1",
        "COLUMNS": "500",
        **({"JKV_ALL_CASES": "1"} if all_cases else {}),
    }
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            hangs = not ends(process, output.fileno(), patience)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    if hangs:
        return {"caught_by": running_test(lines), "note": "timed out"}
    # Exit status 5: no test was collected, such as if all were deselected.
    if process.returncode in (0, 5):
        return {"caught_by": None}
    for line in lines:
        if match := re.match(r"(FAILED|ERROR) (.+?)( - .*)?$", line):
            found = {"caught_by": match[2]}
            if match[1] == "ERROR":
                found["note"] = "an error outside the test, or while collecting"
            return found
    last = next((line for line in reversed(lines) if line.strip()), "")
    if process.returncode in (2, 4):
        raise RuntimeError(f"pytest could not run: {last}")
    note = f"pytest ended with status {process.returncode}"
    return {"caught_by": running_test(lines), "note": note}


def ends(process: subprocess.Popen[bytes], output: int, patience: float) -> bool:
    """Wait for a process; return False if it prints nothing for too long."""
    size, changed = 0, time.monotonic()
    while True:
        try:
            process.wait(timeout=0.5)
            return True
        except subprocess.TimeoutExpired:
            pass
        now = time.monotonic()
        if os.fstat(output).st_size != size:
            size, changed = os.fstat(output).st_size, now
        elif now - changed > patience:
            return False


def running_test(lines: list[str]) -> str:
    """Return the test that started last; `-v` prints each name before it runs."""
    pattern = re.compile(r"(\S+::.+?)\s*(?:(?:PASSED|FAILED|SKIPPED|ERROR|X).*)?$")
    started = [match[1] for line in lines if (match := pattern.match(line))]
    return started[-1] if started else "before the first test"


def kept_results(path: pathlib.Path | None) -> dict[str, Any]:
    """Return the results in an existing file."""
    if path is None or not path.exists():
        return {}
    return dict(json.loads(path.read_text())["results"])


def write_results(path: pathlib.Path, results: dict[str, Any]) -> None:
    """Write the results with commit, Python and JAX versions."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = {
        "commit": done.stdout.strip(),
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "results": results,
    }
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
