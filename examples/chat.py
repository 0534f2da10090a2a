"""Chat with a checkpoint; the cache keeps the history, so only new tokens are computed.

    python examples/chat.py --model path/to/checkpoint

Each line is a message. A line that starts with a slash is a command:

    /undo         remove the last turn
    /branch       continue in a copy of the conversation
    /switch N     switch to branch N
    /save FILE    save this conversation
    /load FILE    load a conversation as a new branch

Without a chat template, as in the bundled model, the model continues the messages.
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
    add("--context", type=number, default=2048, help="maximum tokens; %(default)s")
    help_text = "drop the N oldest tokens if the context is full; N is %(const)s"
    add("--roll", type=number, nargs="?", const=256, metavar="N", help=help_text)
    add("--branches", type=number, default=4, help="maximum number; %(default)s")
    add("--max-new-tokens", type=number, default=128, help="per answer; %(default)s")
    add("--system", type=text, help="system prompt")
    add_stored_dtypes(parser)
    help_text = "0 is greedy; from generation_config.json, else 0"
    add("--temperature", type=at_least(0, float), help=help_text)
    options = parser.parse_args()
    # Imported here so that --help is fast and Ctrl-C works during the imports.
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
    """Run one line; print errors, which leave the conversation unchanged."""
    from chatting.commands import COMMANDS

    from jkv import CacheError

    try:
        if not line.startswith("/"):
            return chat.take_turn(line)
        name, _, argument = line[1:].partition(" ")
        if name not in COMMANDS:
            raise ValueError(
                f"unknown command /{name}; use one of /{', /'.join(COMMANDS)}"
            )
        print(f"({COMMANDS[name](chat, argument.strip())})")
    except (OSError, ValueError, CacheError) as error:
        print(f"({error})")


if __name__ == "__main__":
    with errors_in_one_line():
        main()
