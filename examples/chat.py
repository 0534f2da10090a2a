"""Chat with a checkpoint: what was said stays in the cache, what is new is computed.

    python examples/chat.py --model path/to/checkpoint

A line is a message; one that begins with a slash is a command:

    /undo         forget the last turn
    /branch       go on in a copy of the conversation
    /switch N     go to branch N
    /save FILE    write this conversation
    /load FILE    read one, as a branch of its own

A model without a chat template, as the bundled one, continues the text.
"""

import argparse
import sys
from pathlib import Path

from chatting.commands import COMMANDS
from chatting.turns import Chat

import jkv
from jkv.commands.compiled_programs import keep_compiled_programs

BUNDLED = Path(__file__).parent / "models" / "pydoc"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default=BUNDLED, help="a Hugging Face folder; the bundled model")
    add("--context", type=int, default=2048, help="tokens of a conversation")
    add("--branches", type=int, default=4, help="at most; %(default)s")
    add("--max-new-tokens", type=int, default=128, help="of an answer; %(default)s")
    add("--temperature", type=float, default=0.0, help="0 is greedy; %(default)s")
    options = parser.parse_args()
    keep_compiled_programs()
    try:
        chat = Chat(options)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    while True:
        try:
            line = input("> ")
            if line.startswith("/"):
                run_command(chat, line)
            elif line.strip():
                chat.take_turn(line)
        except EOFError:
            return
        except KeyboardInterrupt:
            print("\n(interrupted)")
            return


def run_command(chat, line):
    """Do what a line says, or say why not; nothing is lost."""
    name, _, argument = line[1:].partition(" ")
    try:
        if name not in COMMANDS:
            raise ValueError(f"no command /{name}; there are /{', /'.join(COMMANDS)}")
        print(f"({COMMANDS[name](chat, argument.strip())})")
    except (OSError, ValueError, jkv.CacheError) as error:
        print(f"({error})")


if __name__ == "__main__":
    main()
