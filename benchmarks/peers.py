"""Adapters: identical workloads on other projects' allocators and page tables.

Each peer is imported from an installed package or a checkout and called by its own
methods; none of its code is copied. Packages are imported without their top-level
`__init__` (which would import whole engines), so that only the allocator's dependencies
must be installed.

Every peer runs the growth of `Workload`: sequence i starts with 1 + i % T tokens and
its first block allocated, and grows by one token per step, so that a step allocates a
block for one sequence in T. A peer's note lists its missing features.
"""

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from harness import Case


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The workload of every allocator."""

    num_sequences: int = 1024  # of an append
    block_size: int = 16  # T
    num_steps: int = 32  # appends per sample: each sequence allocates two more blocks
    num_branches: int = 64  # sequences of a free or a fork
    branch_blocks: int = 16  # blocks of each
    max_context_length: int = 1024

    @property
    def start_lengths(self) -> np.ndarray:
        """Tokens of each sequence before the first step, i32[num_sequences]."""
        return 1 + np.arange(self.num_sequences, dtype=np.int32) % self.block_size

    @property
    def branch_length(self) -> int:
        """Tokens of each branch; its last block is partly filled."""
        return self.branch_blocks * self.block_size - 6

    @property
    def blocks_after(self) -> dict[str, int]:
        """Blocks in use after each operation."""
        ends = self.start_lengths + self.num_steps
        return {
            "append": int(np.sum(-(-ends // self.block_size))),
            "free": 0,
            "fork": self.num_branches * (self.branch_blocks + 1),  # a tail each
        }

    @property
    def max_blocks_per_sequence(self) -> int:
        """Blocks of the longest sequence, M."""
        return -(-self.max_context_length // self.block_size)


def bookkeeping_case(
    *,
    operation: str,
    contender: str,
    workload: Workload,
    num_blocks: int,
    prepare: Callable[[], Any],
    run: Callable[[Any], Any],
    blocks_in_use: Callable[[Any], int],
    **labels: str,
) -> Case:
    """Return a case that checks the number of blocks in use after its first sample.

    Args:
      operation: append, free or fork.
      contender: contender and way of calling it.
      workload: the work.
      num_blocks: size of the pool.
      prepare: creates the state before the operation.
      run: the operation on a state; `append` runs all steps.
      blocks_in_use: counts allocated blocks in the state returned by `run`.
      **labels: further entries of the row.
    """
    expected = workload.blocks_after[operation]

    def check(state: Any) -> None:
        found = blocks_in_use(state)
        if found != expected:
            raise RuntimeError(
                f"{contender}: expected {expected} blocks after {operation}, "
                f"got {found}"
            )

    return Case(
        name=" ".join([operation, contender, *labels.values(), str(num_blocks)]),
        prepare=prepare,
        run=run,
        calls=workload.num_steps if operation == "append" else 1,
        check=check,
        labels={
            "operation": operation,
            "contender": contender,
            "pool": num_blocks,
            **labels,
        },
    )


class Peer:
    """One project's allocator; subclasses call its operations.

    Args:
      root: a checkout, or None for the installed package.

    Raises:
      ImportError: if the project or one of its imports is missing.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    source: ClassVar[str]  # folder of the package within a checkout
    module: ClassVar[str]
    note: ClassVar[str]  # included work and missing features

    def __init__(self, root: pathlib.Path | None) -> None:
        """Import the module."""
        self.version = _version(self.package, root)
        if root is None:
            spec = importlib.util.find_spec(self.package)
            if spec is None or not spec.submodule_search_locations:
                raise ImportError("not installed, and no --peer names a checkout")
            folder = pathlib.Path(spec.submodule_search_locations[0])
        else:
            folder = root / self.source / self.package
        sys.path.append(str(folder.parent))
        # A namespace module in place of the package: its submodules can be imported
        # without running its `__init__`, which imports the whole project.
        shell = types.ModuleType(self.package)
        shell.__path__ = [str(folder)]
        sys.modules[self.package] = shell
        self.library: Any = importlib.import_module(self.module)

    @classmethod
    def is_in(cls, root: pathlib.Path) -> bool:
        """Return True if a checkout is of this project."""
        file = pathlib.Path(cls.source, *cls.module.split(".")).with_suffix(".py")
        return (root / file).is_file()

    def cases(self, workload: Workload, num_blocks: int) -> list[Case]:
        """Return the cases that this peer supports."""
        raise NotImplementedError

    def blocks_in_use(self, state: Any) -> int:
        """Return the number of allocated blocks in a sample's final state."""
        raise NotImplementedError

    def case(
        self,
        operation: str,
        how: str,
        workload: Workload,
        num_blocks: int,
        prepare: Callable[[], Any],
        run: Callable[[Any], Any],
    ) -> Case:
        """Return a case named after the peer."""
        return bookkeeping_case(
            operation=operation,
            contender=f"{self.name}, {how}",
            workload=workload,
            num_blocks=num_blocks,
            prepare=prepare,
            run=run,
            blocks_in_use=self.blocks_in_use,
            peer=self.name,
        )


class NanoVllm(Peer):
    """nano-vllm's block manager: Python objects on the host."""

    name = "nano-vllm BlockManager"
    package, source = "nanovllm", "."
    module = "nanovllm.engine.block_manager"
    note = (
        "host Python; can_append, may_append and append_token per sequence, as its "
        "scheduler calls them. Block lists only: no slots, no table on the device, no "
        "fork; hashing for its prefix cache is not called"
    )

    def cases(self, workload: Workload, num_blocks: int) -> list[Case]:
        """Return append and free; it has no fork."""
        sequence_type = sys.modules["nanovllm.engine.sequence"].Sequence
        sequence_type.block_size = workload.block_size
        manager = self.library.BlockManager(num_blocks, workload.block_size)
        is_open: list[Any] = []

        def start(lengths: list[int]) -> list[Any]:
            while is_open:
                manager.deallocate(is_open.pop())
            for length in lengths:
                is_open.append(sequence_type([0] * length))
                # Without its hash lookup, which requires prompts created by it.
                manager.allocate(is_open[-1], 0)
            return list(is_open)

        def append(sequences: list[Any]) -> Any:
            for _ in range(workload.num_steps):
                for sequence in sequences:
                    sequence.append_token(0)
                    if manager.can_append(sequence):
                        manager.may_append(sequence)
            return manager

        def free(sequences: list[Any]) -> Any:
            for sequence in sequences:
                manager.deallocate(sequence)
            is_open.clear()
            return manager

        lengths = workload.start_lengths.tolist()
        branches = [workload.branch_length] * workload.num_branches
        size = (workload, num_blocks)
        return [
            self.case("append", "host", *size, lambda: start(lengths), append),
            self.case("free", "host", *size, lambda: start(branches), free),
        ]

    def blocks_in_use(self, state: Any) -> int:
        """Count the blocks missing from its free list."""
        return len(state.blocks) - len(state.free_block_ids)


class Vllm(Peer):
    """vLLM's block manager: Python objects on the host."""

    name = "vLLM KVCacheManager"
    package, source = "vllm", "."
    module = "vllm.v1.core.kv_cache_manager"
    note = (
        "host Python; allocate_slots and append_output_token_ids per sequence, as its "
        "scheduler calls them, prefix caching off. Refuses what does not fit; block "
        "lists with reference counts, no slots, no table on the device, no fork"
    )

    def cases(self, workload: Workload, num_blocks: int) -> list[Case]:
        """Return append and free; it has no fork."""
        sizes = importlib.import_module("vllm.v1.kv_cache_interface")
        requests = importlib.import_module("vllm.v1.request")
        sampling = importlib.import_module("vllm.sampling_params").SamplingParams()
        layer = sizes.FullAttentionSpec(
            block_size=workload.block_size,
            num_kv_heads=1,
            head_size=64,
            dtype=importlib.import_module("torch").float16,
        )
        manager = self.library.KVCacheManager(
            sizes.KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[sizes.KVCacheGroupSpec(["layer"], layer)],
            ),
            max_model_len=workload.max_context_length,
            scheduler_block_size=workload.block_size,
            hash_block_size=workload.block_size,
            enable_caching=False,
        )
        is_open: list[Any] = []

        def start(lengths: list[int]) -> list[Any]:
            while is_open:
                manager.free(is_open.pop())
            for i, length in enumerate(lengths):
                request = requests.Request(str(i), [0] * length, sampling, None)
                request.status = requests.RequestStatus.RUNNING
                manager.allocate_slots(request, length)
                request.num_computed_tokens = length
                is_open.append(request)
            return list(is_open)

        def append(sequences: list[Any]) -> Any:
            for _ in range(workload.num_steps):
                for request in sequences:
                    request.append_output_token_ids(0)
                    manager.allocate_slots(request, 1)
                    request.num_computed_tokens += 1
            return manager

        def free(sequences: list[Any]) -> Any:
            for request in sequences:
                manager.free(request)
            is_open.clear()
            return manager

        lengths = workload.start_lengths.tolist()
        branches = [workload.branch_length] * workload.num_branches
        size = (workload, num_blocks)
        return [
            self.case("append", "host", *size, lambda: start(lengths), append),
            self.case("free", "host", *size, lambda: start(branches), free),
        ]

    def blocks_in_use(self, state: Any) -> int:
        """Count the blocks missing from its free list, except block 0, never used."""
        pool = state.block_pool
        return pool.num_gpu_blocks - pool.get_num_free_blocks() - 1


class SglangJax(Peer):
    """sglang-jax's paged allocator: numpy on the host."""

    name = "sglang-jax PagedTokenToKVPoolAllocator"
    package, source = "sgl_jax", "python"
    module = "sgl_jax.srt.mem_cache.allocator"
    note = (
        "host numpy with a Python loop; alloc_decode gives each token its slot, free "
        "in one free_group as its scheduler does. No tables (the caller keeps them), "
        "no reference counts, no fork"
    )

    def cases(self, workload: Workload, num_blocks: int) -> list[Case]:
        """Return append and free; it has no fork."""
        page_size = workload.block_size
        allocator = self.library.PagedTokenToKVPoolAllocator(
            size=num_blocks * page_size, page_size=page_size, kvcache=None
        )

        def start(lengths: np.ndarray) -> np.ndarray:
            allocator.clear()
            zeros = np.zeros_like(lengths)
            slots = allocator.alloc_extend(
                zeros, lengths, zeros - 1, int(lengths.sum())
            )
            assert slots is not None
            return slots

        def prepare_append() -> tuple[np.ndarray, np.ndarray]:
            lengths = workload.start_lengths
            return lengths, start(lengths)[np.cumsum(lengths) - 1]

        def append(state: tuple[np.ndarray, np.ndarray]) -> Any:
            lengths, last = state
            for _ in range(workload.num_steps):
                lengths += 1
                last = allocator.alloc_decode(lengths, last)
            return allocator

        def prepare_free() -> list[np.ndarray]:
            count = workload.num_branches
            length = workload.branch_length
            slots = start(np.full((count,), length, np.int32))
            return np.split(slots, count)

        def free(sequences: list[np.ndarray]) -> Any:
            allocator.free_group_begin()
            for slots in sequences:
                allocator.free(slots)
            allocator.free_group_end()
            return allocator

        size = (workload, num_blocks)
        return [
            self.case("append", "host", *size, prepare_append, append),
            self.case("free", "host", *size, prepare_free, free),
        ]

    def blocks_in_use(self, state: Any) -> int:
        """Count the pages that are not available."""
        return state.num_pages - state.available_size() // state.page_size


class Levanter(Peer):
    """Levanter's page table: a pytree inside jit, with reference counts."""

    name = "Levanter PageTable"
    package, source = "levanter", "src"
    module = "levanter.inference.page_table"
    note = (
        "in jit; allocate_for_seq, free_pages_for_finished, and clone_pages_from in a "
        "fori_loop as its engine does. Reference counts and slots; a free page is "
        "found by argmin over the pool; running out raises in jit, no refusal"
    )

    def cases(self, workload: Workload, num_blocks: int) -> list[Case]:
        """Return append, eagerly and in a scan, free and fork."""
        hax = importlib.import_module("haliax")
        steps = workload.num_steps

        def table(lengths: np.ndarray) -> Any:
            empty = self.library.PageTable.init(
                num_blocks,
                workload.num_sequences,
                workload.block_size,
                workload.max_blocks_per_sequence,
            )
            used = hax.named(jnp.arange(workload.num_sequences) < len(lengths), "seq")
            empty = dataclasses.replace(empty, used_mask=used)
            owner = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
            position = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
            grown, _ = empty.allocate_for_seq(
                hax.named(owner, "position"), hax.named(position, "position")
            )
            return jax.block_until_ready(grown)

        sequence = jnp.arange(workload.num_sequences, dtype=jnp.int32)

        def step(table: Any) -> tuple[Any, Any]:
            position = hax.named(table.seq_lens.array, "position")
            return table.allocate_for_seq(hax.named(sequence, "position"), position)

        def eager(table: Any) -> Any:
            for _ in range(steps):
                table, batch = step(table)
                jax.block_until_ready(batch.new_token_dests)
            return table

        @jax.jit
        def scan(table: Any) -> Any:
            return jax.lax.scan(lambda t, _: step(t), table, None, length=steps)

        def scanned(table: Any) -> Any:
            return jax.block_until_ready(scan(table))[0]

        @jax.jit
        def fork(table: Any) -> Any:
            def one(i: jax.Array, table: Any) -> Any:
                return table.clone_pages_from(i, workload.num_branches + i)

            return jax.lax.fori_loop(0, workload.num_branches, one, table)

        started = table(workload.start_lengths)
        branches = table(
            np.full((workload.num_branches,), workload.branch_length, np.int32)
        )

        def fresh(table: Any) -> Callable[[], Any]:
            return lambda: jax.block_until_ready(jax.tree.map(jnp.copy, table))

        def blocked(function: Callable) -> Callable:
            return lambda state: jax.block_until_ready(function(state))

        def prepare_free() -> tuple[Any, jax.Array]:
            # A new mask each time, since the call donates all its arguments.
            return fresh(branches)(), sequence < workload.num_branches

        def free(state: tuple[Any, jax.Array]) -> Any:
            table, finished = state
            return table.free_pages_for_finished(finished)

        size = (workload, num_blocks)
        return [
            self.case("append", "eager", *size, fresh(started), eager),
            self.case("append", "in a scan", *size, fresh(started), scanned),
            self.case("free", "eager", *size, prepare_free, blocked(free)),
            self.case("fork", "in jit", *size, fresh(branches), blocked(fork)),
        ]

    def blocks_in_use(self, state: Any) -> int:
        """Count the pages with references."""
        return int(np.sum(np.asarray(state.page_ref_counts.array) > 0))


class MaxText(Peer):
    """MaxText's page manager, deleted from the project in May 2026."""

    name = "MaxText PageManager"
    package, source = "maxtext", "src"
    module = "maxtext.inference.page_manager"
    note = (
        "in jit; update_decode_pages, and release_pages per sequence. No reference "
        "counts, no fork; a free page is found by argmax over the pool; running out "
        "leaves a length without a page and says nothing"
    )

    def cases(self, workload: Workload, num_blocks: int) -> list[Case]:
        """Return append, eagerly and in a scan, and free; it has no fork."""
        steps = workload.num_steps
        manager = self.library.PageManager(
            types.SimpleNamespace(
                pagedattn_num_pages=num_blocks,
                pagedattn_tokens_per_page=workload.block_size,
                max_target_length=workload.max_context_length,
                global_batch_size_to_load=workload.num_sequences,
                pagedattn_max_pages_per_group=workload.max_blocks_per_sequence,
            )
        )

        def state(lengths: list[int]) -> Any:
            state = manager.get_initial_page_state()
            for group, length in enumerate(lengths):
                state = manager.update_prefill_pages(state, group, length)
            return jax.block_until_ready(state)

        def eager(state: Any) -> Any:
            for _ in range(steps):
                state = jax.block_until_ready(manager.update_decode_pages(state))
            return state

        @jax.jit
        def many(state: Any) -> Any:
            def step(state: Any, _: None) -> tuple[Any, Any]:
                state = manager.update_decode_pages(state)
                return state, (state.active_page, state.active_page_position)

            return jax.lax.scan(step, state, None, length=steps)

        def scan(state: Any) -> Any:
            return jax.block_until_ready(many(state))[0]

        def free(state: Any) -> Any:
            for group in range(workload.num_branches):
                state = manager.release_pages(state, group)
            return jax.block_until_ready(state)

        started = state(workload.start_lengths.tolist())
        branches = state([workload.branch_length] * workload.num_branches)
        size = (workload, num_blocks)
        return [
            self.case("append", "eager", *size, lambda: started, eager),
            self.case("append", "in a scan", *size, lambda: started, scan),
            self.case("free", "eager", *size, lambda: branches, free),
        ]

    def blocks_in_use(self, state: Any) -> int:
        """Count the marked pages, except page 0, never used."""
        return int(np.sum(np.asarray(state.page_status))) - 1


PEERS: tuple[type[Peer], ...] = (NanoVllm, Vllm, SglangJax, Levanter, MaxText)


def load(roots: list[pathlib.Path]) -> tuple[list[Peer], dict[str, str]]:
    """Import the available peers.

    Args:
      roots: checkouts, identified by their files.

    Returns:
      The peers, and the error of each missing one, by name.

    Raises:
      ValueError: for a root without a known project.
    """
    for root in roots:
        if not any(peer.is_in(root) for peer in PEERS):
            names = ", ".join(f"{peer.name} ({peer.module})" for peer in PEERS)
            raise ValueError(f"{root} must be a checkout of one of {names}")
    found, absent = [], {}
    for peer in PEERS:
        root = next((root for root in roots if peer.is_in(root)), None)
        try:
            found.append(peer(root))
        except Exception as error:  # third-party imports may raise anything
            sys.modules.pop(peer.package, None)
            absent[peer.name] = f"{type(error).__name__}: {error}"
    return found, absent


def _version(package: str, root: pathlib.Path | None) -> str:
    """Return a checkout's commit or an installed package's version."""
    if root is None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"
    command = ["git", "-C", str(root), "show", "-s", "--format=%h of %cs", "HEAD"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"commit {answer.stdout.strip()}" if answer.returncode == 0 else "unknown"
