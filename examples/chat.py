"""Chat with a checkpoint: the history stays in the cache, new tokens are computed.

    python examples/chat.py --model path/to/checkpoint

A line is a message; one that begins with a slash is a command:

    /undo         forget the last turn
    /branch       go on in a copy of the conversation
    /switch N     go to branch N
    /save FILE    write this conversation
    /load FILE    read one, as a branch of its own

A model without a chat template, as the bundled one, continues the text.
"""

from generating.arguments import Parser, add_stored_dtypes, at_least, text
from generating.exiting import answering_errors, errors_in_one_line
from generating.options import BUNDLED


def main():
    parser = Parser(__doc__)
    add, number = parser.add_argument, at_least(1)
    add(
        "--model",
        default=BUNDLED,
        help="a Hugging Face folder or GGUF file",
    )
    add("--context", type=number, default=2048, help="tokens of a conversation")
    said = "a full context drops N of its oldest tokens; %(const)s if not said"
    add("--roll", type=number, nargs="?", const=256, metavar="N", help=said)
    add("--branches", type=number, default=4, help="at most; %(default)s")
    add("--max-new-tokens", type=number, default=128, help="of an answer; %(default)s")
    add("--system", type=text, help="what the model is told before the first message")
    add_stored_dtypes(parser)
    said = "0 is greedy; generation_config.json's, else 0"
    add("--temperature", type=at_least(0, float), help=said)
    options = parser.parse_args()
    # Imported here, so that --help comes at once and Ctrl-C is answered meanwhile.
    from chatting.turns import Chat

    import jkv

    jkv.keep_compiled_programs()
    with answering_errors():
        chat = Chat(options)
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        if line.strip():
            answer(chat, line)


def answer(chat, line):
    """Run a line, or print why not; nothing is lost."""
    from chatting.commands import COMMANDS

    from jkv import CacheError

    try:
        if not line.startswith("/"):
            return chat.take_turn(line)
        name, _, argument = line[1:].partition(" ")
        if name not in COMMANDS:
            raise ValueError(f"no command /{name}; there are /{', /'.join(COMMANDS)}")
        print(f"({COMMANDS[name](chat, argument.strip())})")
    except (OSError, ValueError, CacheError) as error:
        print(f"({error})")


if __name__ == "__main__":
    with errors_in_one_line():
        main()
