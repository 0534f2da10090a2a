"""Load a checkpoint and create its engine."""

import argparse
import dataclasses
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pretrained
from generating.arguments import add_stored_dtypes
from pretrained.drafters import load_drafter
from pretrained.settings import read_json
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

MOST_STOP_TOKENS = 8  # per request, besides the model's own
ROOM_SECONDS = 60.0  # to wait for a grammar's compilation and capacity
MOST_CONTEXT = 4096  # the default; the pool's size depends on it
LONGER = 8  # contexts per sequence with --roll
OWN_LAYER = "mtp"  # instead of a drafter's folder
SINKS = 4  # first tokens, never dropped

# As in Hermes, Qwen and others.
TOOL_TAGS = ("<tool_call>", "</tool_call>")

BUNDLED = Path(__file__).parents[1] / "models" / "pydoc"


class Served(NamedTuple):
    """A served model."""

    engine: Engine
    tokenizer: Tokenizer
    folder: Path
    context: int  # maximum tokens of prompt and completion
    max_new_tokens: int | None = None  # the default; None: to the context's end
    sampling: Mapping[str, float] = {}  # default sampling parameters
    known_as: str | None = None  # the model's name; None: its folder's
    begin_tokens: tuple[int, ...] = ()  # for an empty prompt
    scorer: Scorer | None = None  # log-probabilities of given sequences
    spelling: Spelling | None = None  # bytes of single tokens
    stop_tokens: tuple[int, ...] = ()  # the model's own
    max_waiting: int | None = None  # sequences; None: no limit
    longest_token: int = 1  # in characters
    processors: Processors | None = None  # grammars and rules
    has_languages: bool = False  # True if grammars are enabled
    has_rules: bool = False  # True if per-request rules are enabled
    vocabulary_size: int = 0  # number of tokens
    tool_tags: tuple[str, str] = TOOL_TAGS  # before and after a tool call
    store: jkv.BlockStore | None = None  # offloaded cache blocks
    roll: jkv.Roll | None = None  # drops tokens of a full context
    slots: int = 0  # per full context

    @property
    def keep_classes(self) -> int:
        """Number of retention priorities of cached blocks."""
        return self.engine.cache.metadata.num_classes

    @property
    def name(self) -> str:
        """The model's name."""
        return self.known_as or self.folder.resolve().name

    def count_dropped(self, num_tokens: int) -> int:
        """Return a sequence's number of dropped tokens; its last token has no slot.

        Args:
            num_tokens: length of prompt and completion.
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
        """Return the logits processors of a request, held until released.

        Args:
            language: the language of the completions.
            rules: the rules of the request.
            seconds: time limit for compiling the grammar and waiting for capacity.

        Raises:
            Refused: if the language is invalid, or the time limit is exceeded.
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
        """Stop these processes, and save cached blocks to the store's folder."""
        if self.processors is not None:
            self.processors.close()
        storing.keep(self.store)

    @property
    def most_characters(self) -> int:
        """Maximum characters of a prompt; longer prompts are refused untokenized."""
        return self.context * self.longest_token


def add_options(parser: argparse.ArgumentParser, *, may_share: bool = True) -> None:
    """Add the options that all servers share.

    Args:
        parser: the command line's parser.
        may_share: whether several processes may share the model.
    """
    add = parser.add_argument
    add(
        "--model",
        default=BUNDLED,
        help="a Hugging Face folder or GGUF file",
    )
    add("--max-running", type=int, default=16, help="sequences at a time; %(default)s")
    help_text = f"tokens per sequence; the model's limit, at most {MOST_CONTEXT}"
    add("--context", type=int, help=help_text)
    help_text = "default limit; the checkpoint's, else the rest of the context"
    add("--max-new-tokens", type=int, help=help_text)
    add("--served-model-name", help="model name for clients; its folder's name")
    add_stored_dtypes(parser)
    help_text = "drop the N oldest tokens of a full context; a sequence may have"
    add("--roll", type=int, metavar="N", help=f"{help_text} {LONGER} contexts")
    help_text = (
        f"a folder for speculative decoding; {OWN_LAYER!r} is the model's MTP layer"
    )
    add("--drafter", metavar="FOLDER", help=help_text)
    add("--blocks", type=int, help="of the pool; default: enough for all sequences")
    add("--rows", type=int, help="per step, one shape; default: two shapes")
    add("--scan-layers", action="store_true", help="compile faster, run slower")
    storing.add_options(parser)
    if may_share:
        processes.add_options(parser)


def read_share(text: str) -> tuple[str, float]:
    """Parse a client's share, NAME=NUMBER.

    Raises:
        ArgumentTypeError: for any other string.
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
    """Load the model of the command line.

    Returns:
        The model, its parameters, and their mesh or None.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if the file or folder is not a checkpoint.
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
    """Load a checkpoint, and create an engine from command-line options.

    Args:
        options: the parsed options of `add_options`.
        max_waiting: as in `jkv.serving.Engine`.
        max_grammars: grammars of running requests at a time; 0 disables grammars.
        max_rules: requests with rules at a time; 0 disables rules.
        tool_tags: the tags before and after a tool call.
        **changes: further arguments of `jkv.serving.Engine`.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if a size is invalid.
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
    heads, with_all, drafter = None if mesh is None else "tp", config, None
    if options.drafter is not None:
        own = None if options.drafter == OWN_LAYER else options.drafter
        drafter = load_drafter(own, model, params, config, target=options.model)
        with_all = jkv.with_drafter(config, drafter)
    cache = jkv.init(with_all, mesh=mesh, heads=heads)
    fields |= dict(store=store, speculate=drafter)
    engine = Engine(model, params, cache, **(fields | changes))
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
    """Return the checkpoint's default `max_new_tokens`, or None.

    Raises:
        ValueError: if generation_config.json is not a JSON object.
    """
    path = pretrained.find_folder(folder) / "generation_config.json"
    settings = read_json(path) if path.is_file() else {}
    most = settings.get("max_new_tokens")
    return most if isinstance(most, int) and most > 0 else None


def _find_begin_tokens(
    tokenizer: Tokenizer, stop_tokens: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the tokens that replace an empty prompt.

    These are the tokenizer's own prefix, else the first stop token, as in GPT-2.
    """
    before = tokenizer.encode("").ids
    return tuple(before) or stop_tokens[:1]
