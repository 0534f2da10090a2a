"""An agent with a calculator: the tool and the rollout."""
