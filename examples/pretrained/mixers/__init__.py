"""What layers have beside attention, or instead of it: mixers with a state."""
