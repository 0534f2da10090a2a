"""Continue a file of prompts, and write each result as soon as it is there.

    python examples/serve_batch.py prompts.jsonl results.jsonl --model FOLDER

A line of the first file is an object in the words of OpenAI's API: "prompt" or
"messages", and if you like "max_tokens", "temperature", "top_p", "seed", "stop", "n".
Run it again after an interrupt: what is in the second file is not computed again.
What happens is in `served/batch.py`.
"""

import argparse

from generating.ending import ending_in_one_line

if __name__ == "__main__":
    with ending_in_one_line():
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("prompts", help="lines of JSON")
        parser.add_argument("results", help="where to; what is there is gone on with")
        # Imported here, so that Ctrl-C is answered meanwhile.
        from served.batch import serve
        from served.loading import add_options

        add_options(parser)
        serve(parser.parse_args())
