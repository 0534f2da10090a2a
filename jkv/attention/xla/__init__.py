"""Attention in plain XLA: loops over gathered chunks of blocks.

Start with `interface`, which chooses a loop and its sizes: `tiles` for prompts and
small calls, `decode` for one row of each request, `shared` for prefixes in common.
"""
