"""python -m jkv: list the commands."""

import argparse
from typing import NamedTuple


class Command(NamedTuple):
    """A line of the list."""

    name: str
    purpose: str
    page: str  # of the documentation, in docs/


COMMANDS = (
    Command("python -m jkv.plan", "size the cache beside a model", "questions.md"),
    Command("python -m jkv.doctor", "test the features on this machine", "install.md"),
)
# Of the distribution jkv-examples.
OF_EXAMPLES = (
    Command("jkv-generate", "continue prompts with a model", "how-to/gguf-on-cpu.md"),
    Command("jkv-chat", "chat in a terminal", "how-to/multi-turn-chat.md"),
    Command("jkv-serve", "serve OpenAI's API", "how-to/openai-server.md"),
    Command("jkv-batch", "answer a file of requests", "how-to/serving-engine.md"),
)


def main(arguments: list[str] | None = None) -> None:
    """Print each command with its purpose and its page."""
    parser = argparse.ArgumentParser(
        prog="python -m jkv", description="List the commands."
    )
    parser.parse_args(arguments)
    print("Commands of jkv, a paged key/value cache for JAX, and their pages:\n")
    _print(COMMANDS)
    print("\nWith the package jkv-examples:\n")
    _print(OF_EXAMPLES)
    print("\nEach lists its options with --help.")


def _print(commands: tuple[Command, ...]) -> None:
    """Print a line for each command, in columns."""
    every = COMMANDS + OF_EXAMPLES
    names, purposes = (max(len(each[i]) for each in every) for i in range(2))
    for name, purpose, page in commands:
        print(f"  {name:{names}}  {purpose:{purposes}}  docs/{page}")


if __name__ == "__main__":
    main()
