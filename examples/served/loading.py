"""A checkpoint becomes an engine that takes and gives texts."""

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pretrained
from generating.arguments import add_stored_dtypes
from tokenizers import Tokenizer

import jkv
from jkv.grammar import vocabulary_of
from jkv.serving import Engine, StopSizes

from . import processes, storing
from .asking.languages import Language
from .processors.grammars import Languages
from .processors.rule_table import Rules, RuleTable
from .processors.variants import Held, Processors
from .replying.scoring import Scorer, make_scorer
from .replying.spelling import Spelling

MOST_STOP_TOKENS = 8  # of a request, beside the model's own
ROOM_SECONDS = 60.0  # in which a request's grammar is compiled, and has room
MOST_CONTEXT = 4096  # where nobody says: the pool has room for it
LONGER = 8  # contexts of a text that drops its oldest tokens
SINKS = 4  # first tokens, which are never dropped

# Of Hermes, Qwen and others.
TOOL_TAGS = ("<tool_call>", "</tool_call>")

BUNDLED = Path(__file__).parents[1] / "models" / "pydoc"


class Served(NamedTuple):
    """A model that is being served."""

    engine: Engine
    tokenizer: Tokenizer
    folder: Path
    context: int  # most tokens of a prompt and its answer
    max_new_tokens: int | None = None  # of a text that does not say; None: as it may
    sampling: Mapping[str, float] = {}  # fields of `jkv.Sampling` that nobody says
    known_as: str | None = None  # the model's name; None is its folder's
    begin_tokens: tuple[int, ...] = ()  # of a prompt that has none
    scorer: Scorer | None = None  # tells log-probabilities of texts that are there
    spelling: Spelling | None = None  # of single tokens
    stop_tokens: tuple[int, ...] = ()  # the model's own
    max_waiting: int | None = None  # most sequences that wait; None is any number
    longest_token: int = 1  # characters
    processors: Processors | None = None  # the logits processors of texts
    has_languages: bool = False  # True if requests may name a language
    has_rules: bool = False  # whether requests can have rules of their own
    vocabulary_size: int = 0  # tokens that the model knows
    tool_tags: tuple[str, str] = TOOL_TAGS  # before and behind a call of a tool
    store: jkv.BlockStore | None = None  # where cached blocks go
    roll: jkv.Roll | None = None  # how a full context drops tokens
    slots: int = 0  # of a full context

    @property
    def keep_classes(self) -> int:
        """Retention priorities of cached blocks."""
        return self.engine.cache.metadata.num_classes

    @property
    def name(self) -> str:
        """The model's name."""
        return self.known_as or self.folder.resolve().name

    def count_dropped(self, num_tokens: int) -> int:
        """Return how many tokens a text of so many has dropped; its last has no slot.

        Args:
            num_tokens: of the prompt and the answer.
        """
        if self.roll is None:
            return 0
        return self.roll.count_dropped(num_tokens - 1, self.slots)

    def hold(
        self,
        language: Language | None,
        rules: Rules | None = None,
        seconds: float = ROOM_SECONDS,
    ) -> Held:
        """Return the logits processors of a request, kept until they are released.

        Args:
            language: of the texts.
            rules: of the request.
            seconds: in which a grammar is compiled, and there is room.

        Raises:
            Refused: if there is no such language, or no room in time.
        """
        if self.processors is None:
            return Held()
        deadline = time.monotonic() + seconds
        return self.processors.hold(self.engine, language, rules, deadline)

    def begin(self) -> None:
        """Start the processes that compile grammars."""
        if self.processors is not None:
            self.processors.start()

    def end(self) -> None:
        """End it."""
        if self.processors is not None:
            self.processors.close()
        storing.keep(self.store)

    @property
    def most_characters(self) -> int:
        """Most characters of a text; one with more is refused without tokenizing it."""
        return self.context * self.longest_token


def add_options(parser: argparse.ArgumentParser, *, may_share: bool = True) -> None:
    """Add the options of all servers to a command line.

    Args:
        parser: of the command line.
        may_share: whether several processes may share the model.
    """
    add = parser.add_argument
    add(
        "--model",
        default=BUNDLED,
        help="a Hugging Face folder or GGUF file",
    )
    add("--max-running", type=int, default=16, help="texts at one time; %(default)s")
    said = f"tokens of a text; the model's own, at most {MOST_CONTEXT}"
    add("--context", type=int, help=said)
    said = "of a text that does not say; the checkpoint's, else what the context leaves"
    add("--max-new-tokens", type=int, help=said)
    add("--served-model-name", help="what clients call the model; its folder's name")
    add_stored_dtypes(parser)
    said = "a full context drops N of its oldest tokens, so that a text may have"
    add("--roll", type=int, metavar="N", help=f"{said} {LONGER} contexts")
    add("--blocks", type=int, help="of the pool; else what all running can need")
    add("--rows", type=int, help="of every step: less to compile; else few and many")
    add("--scan-layers", action="store_true", help="compile faster, compute slower")
    storing.add_options(parser)
    if may_share:
        processes.add_options(parser)


def read_share(text: str) -> tuple[str, float]:
    """Read a client's share from the command line, NAME=NUMBER.

    Raises:
        ArgumentTypeError: for anything else.
    """
    name, _, number = text.rpartition("=")
    try:
        share = float(number)
    except ValueError:
        share = 0.0
    if not name or not 0 < share < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=NUMBER, above 0")
    return name, share


def read_model(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Read the model that the command line names.

    Returns:
        The model, its weights, and the mesh on which they lie, None without one.

    Raises:
        OSError: when a file cannot be read.
        ValueError: when it is no checkpoint.
    """
    mesh = processes.find_mesh(options)
    model, params = pretrained.load(
        options.model,
        mesh=mesh,
        scan_layers=options.scan_layers,
        loop_layers=pretrained.prefers_loops(mesh),
    )
    return model, params, mesh


def load(
    options: argparse.Namespace,
    *,
    max_waiting: int | None = None,
    max_grammars: int = 0,
    max_rules: int = 0,
    tool_tags: tuple[str, str] = TOOL_TAGS,
    **changes: object,
) -> Served:
    """Read a checkpoint, and make an engine of the command line's sizes.

    Args:
        options: of `add_options`.
        max_waiting: of `jkv.serving.Engine`.
        max_grammars: languages that requests have at one time; 0 disables grammars.
        max_rules: requests with rules of their own at one time; 0 for none.
        tool_tags: the text before a call of a tool, and the text behind it.
        **changes: further arguments of `jkv.serving.Engine`.

    Raises:
        OSError: when a file cannot be read.
        ValueError: when a size cannot be.
    """
    model, params, mesh = read_model(options)
    tokenizer = pretrained.load_tokenizer(options.model)
    longest = model.config.max_context_length
    context = min(options.context or MOST_CONTEXT, longest)
    config = model.cache_config(
        context,
        max_sequences=options.max_running,
        dtype=options.kv_dtype or params["embedding"].dtype,
        value_dtype=options.value_dtype,
        prefix_caching=True,
        num_blocks=options.blocks,
        pruning=options.roll is not None,
    )
    slots, roll = context, None
    if options.roll is not None:
        roll = jkv.Roll(first=SINKS, step=options.roll)
        context *= LONGER
    stop_tokens = tuple(model.config.stop_tokens)
    languages = None
    if max_grammars and stop_tokens:
        vocabulary = vocabulary_of(tokenizer, stop_tokens, size=model.config.vocab_size)
        languages = Languages(vocabulary, max_grammars)
    most_stop_tokens = len(stop_tokens) + MOST_STOP_TOKENS
    table = RuleTable(max_rules, most_stop_tokens, model.config.vocab_size)
    processors = Processors(languages, table)
    fields = dict(
        max_running=options.max_running,
        max_new_tokens=context,
        max_prompt_tokens=context,
        roll=roll,
        row_counts=(options.rows,) if options.rows else None,
        stop_tokens=stop_tokens,
        stop_sizes=StopSizes(most_stop_tokens, 0, 0),
        detokenize=tokenizer.decode,
        max_waiting=max_waiting,
        logits_processor=processors.logits_processor,
        kept_programs=pretrained.keep_programs(model) if mesh is None else None,
    )
    store = storing.make_store(options)
    config = dataclasses.replace(config, keep_classes=options.keep_classes)
    heads = None if mesh is None else "tp"
    cache = jkv.init(config, mesh=mesh, heads=heads)
    engine = Engine(model, params, cache, store=store, **(fields | changes))
    return Served(
        engine,
        tokenizer,
        Path(options.model),
        context,
        max_new_tokens=options.max_new_tokens or read_max_new_tokens(options.model),
        sampling=pretrained.read_sampling(options.model),
        known_as=options.served_model_name,
        begin_tokens=_find_begin_tokens(tokenizer, stop_tokens),
        scorer=make_scorer(model, params, config) if mesh is None else None,
        spelling=Spelling(tokenizer),
        stop_tokens=stop_tokens,
        max_waiting=max_waiting,
        longest_token=max(map(len, tokenizer.get_vocab())),
        processors=processors,
        has_languages=languages is not None,
        has_rules=max_rules > 0,
        vocabulary_size=model.config.vocab_size,
        tool_tags=tool_tags,
        store=store,
        roll=roll,
        slots=slots,
    )


def read_max_new_tokens(folder: str | Path) -> int | None:
    """Return how long the checkpoint's texts are; None where it does not say."""
    path = pretrained.find_folder(folder) / "generation_config.json"
    settings = json.loads(path.read_text()) if path.is_file() else {}
    most = settings.get("max_new_tokens")
    return most if isinstance(most, int) and most > 0 else None


def _find_begin_tokens(
    tokenizer: Tokenizer, stop_tokens: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the first tokens of a text that has nothing before it.

    They are the tokenizer's own prefix; else the first end token, as in GPT-2.
    """
    before = tokenizer.encode("").ids
    return tuple(before) or stop_tokens[:1]
