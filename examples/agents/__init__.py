"""An agent with a calculator: its rollout, and the step that learns from it."""
