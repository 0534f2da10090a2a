"""Which sequences run: admission, preemption, and the step that they share."""
