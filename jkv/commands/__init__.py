"""Tools: the commands `python -m jkv.doctor` and `python -m jkv.plan`.

`diagnosis` runs the checks of this machine that the doctor reports (`report`), and
`capacity` computes the sizes that the plan prints. Start with these two. The modules
for `python -m` are in the root package.
"""

from jkv.commands.compiled_programs import keep_compiled_programs, remove_oldest
from jkv.xla_flags import find_user_cache

__all__ = ["find_user_cache", "keep_compiled_programs", "remove_oldest"]
