"""RL rollouts for google-tunix: `JkvRollout`, a `rollout_engine` of its trainers."""

try:
    import tunix  # noqa: F401
except ImportError as error:
    raise ImportError(
        "jkv.integrations.tunix needs google-tunix: pip install '.[tunix]' "
        "in the folder of jkv"
    ) from error

from jkv.integrations.tunix.rollout import JkvRollout

__all__ = ["JkvRollout"]
