"""The optional prefix index: which full blocks hold which prompt's beginning."""
