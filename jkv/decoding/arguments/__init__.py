"""What a loop is asked for, as values or by the names of their fields."""
